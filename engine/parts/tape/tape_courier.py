"""Hands out the tape of an engine."""

from __future__ import annotations

import msgspec

from engine.core.mail.courier import Courier, Server
from engine.wire.parts.tape import TakeTape, TapeTaken


class TapeCourier(Courier):
    def take(self, command: msgspec.Struct, server: Server) -> bool:
        if not isinstance(command, TakeTape):
            return False
        server.tell(TapeTaken(command.call_id, server.core.journal.take()))
        return True

"""Hands out the tape of an engine."""

from __future__ import annotations

import msgspec

from engine.core.mail.courier import Courier, Server
from engine.wire.messages import Answer
from engine.wire.parts.tape import TakeTape


class TapeCourier(Courier):
    def take(self, command: msgspec.Struct, server: Server) -> bool:
        if not isinstance(command, TakeTape):
            return False
        server.tell(Answer.to(command, server.core.journal.take()))
        return True

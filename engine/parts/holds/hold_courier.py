"""Carries out what other processes ask of an engine's holds."""

from __future__ import annotations

import msgspec

from engine.core.mail.courier import Courier, Server
from engine.parts.holds.inputs import HoldsGiven, HoldsReleased
from engine.wire.messages import Answer
from engine.wire.parts.holds import GiveHolds, HeldPrompts, ReleaseHolds
from engine.wire.remote_request import Peer


class HoldCourier(Courier):
    def __init__(self, peer: Peer | None):
        """peer: this engine, if others can fetch blocks from it."""
        self._peer = peer

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        match command:
            case GiveHolds(limit):
                server.tell(Answer.to(command, HeldPrompts(self._peer, server.core.apply(HoldsGiven(limit)))))
            case ReleaseHolds(name, client):
                server.core.apply(HoldsReleased(name, client))
            case _:
                return False
        return True

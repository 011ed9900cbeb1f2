"""The tapes of the fake replica of a FakeApi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from deployments.parts.tape.questions import (
    FirstTokensLate,
    KeptTape,
    ListKeptTapes,
    PoolTapes,
    ReadKeptTape,
    TakeTapes,
)
from deployments.replicas.pools import ReplicaQuestion
from deployments.replicas.replica_part import ReplicaPart
from engine.parts.tape.engine_tape import tape_with_key
from engine.wire.parts.tape import TakeTape
from tests.deployments.fake_api import FakeApi


class FakeTapes(ReplicaPart):
    """files: kept tapes. late: what it was told of late first tokens."""

    def __init__(self, api: FakeApi, *files: Path, tape: bytes = b""):
        """tape: of the engine, in msgpack; empty for none."""
        self.late: list[str] = []
        self.files, self._replica = files, api.replica
        api.engine.answers[TakeTape] = tape
        api.pool.parts.append(self)

    async def answer(self, question: ReplicaQuestion) -> Any:
        match question:
            case FirstTokensLate(reason):
                self.late.append(reason)
            case TakeTapes(key):
                tape = msgspec.msgpack.decode(await self._replica.ask(TakeTape()))
                return PoolTapes([tape_with_key(tape, key)] if tape else [], [])
            case ListKeptTapes():
                return [KeptTape(file.name, file.stat().st_size, 0.0, own=False) for file in self.files]
            case ReadKeptTape(name):
                return next((file.read_bytes() for file in self.files if file.name == name), b"")
        return None

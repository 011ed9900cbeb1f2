"""The tapes of a replica: of its engines, and of its routers to other pools."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.left_tapes import LeftTapes
from deployments.parts.tape.questions import FirstTokensLate, ListKeptTapes, PoolTapes, ReadKeptTape, TakeTapes
from deployments.replicas.pools import ReplicaQuestion
from deployments.replicas.replica_part import ReplicaPart, ReplicaSetup
from engine.wire.parts.tape import TakeTape

ENGINE_TIMEOUT_S = 20.0  # for an engine to send its tape


def make(setup: ReplicaSetup) -> ReplicaPart:
    return ReplicaTapes(setup)


class ReplicaTapes(ReplicaPart):
    def __init__(self, setup: ReplicaSetup):
        max_mib = setup.config.tape_mib
        self._engines = setup.engines
        self._choices = [ChoiceLog.of(pool, max_mib) for pool in setup.pools] if max_mib else []
        self._left = LeftTapes(setup.config, setup.engines.ids)

    async def answer(self, question: ReplicaQuestion) -> Any:
        match question:
            case TakeTapes(key):
                routers = [tape for log in self._choices for tape in log.take(self._engines.ids[0])]
                return PoolTapes(await self._of_engines(key), routers)
            case FirstTokensLate(reason):
                await self._left.write(await self._of_engines(b""), reason)
            case ListKeptTapes():
                return await self._left.files()
            case ReadKeptTape(name):
                return await self._left.read(name)
        return None

    async def _of_engines(self, key: bytes) -> list[bytes]:
        """Return the tape of each engine that records one, its hashes with this key. Raises EngineUnavailable."""
        # only an operator needs it, so replicas start without it
        from engine.parts.tape.engine_tape import tape_with_key

        taken = [msgspec.msgpack.decode(tape) for tape in await self._engines.ask(TakeTape(), ENGINE_TIMEOUT_S)]
        return await asyncio.gather(*(asyncio.to_thread(tape_with_key, tape, key) for tape in taken if tape))

    async def ended(self, reason: str) -> None:
        await self._left.keep(reason)

    def stopped(self) -> None:
        self._left.remove()

"""The engines of one replica: one, or several that share experts. They live and die together. Independent of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from deployments.replicas.departure import Statuses
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaStatus
from engine.wire.messages import Command, EngineStatus, Question
from engine.wire.stats.handoff_stats import Role

E = TypeVar("E", bound=EngineControl)


class ReplicaEngines(Generic[E]):
    """The engines by id, in the order of their ranks."""

    def __init__(self, engines: Mapping[str, E]):
        self._engines = dict(engines)
        self.all = list(self._engines.values())

    @property
    def ids(self) -> list[str]:
        return list(self._engines)

    def choose(self, engine_id: str) -> E:
        """Return the engine with this id, or the one with the fewest requests if there is none."""
        return self._engines.get(engine_id) or min(self.all, key=lambda engine: engine.num_answers)

    def statuses(self) -> list[ReplicaStatus]:
        """Return the newest status of each engine. Raises EngineUnavailable if one is unhealthy."""
        return [engine.status() for engine in self.all]

    def others(self, statuses: Statuses) -> Statuses:
        """Return a function that returns the statuses of engines that are not of this replica. statuses: function that
        returns those of all replicas."""

        async def of_other_replicas() -> list[EngineStatus]:
            return [status for status in await statuses() if status.engine_id not in self._engines]

        return of_other_replicas

    async def ask(self, question: Question, timeout_s: float | None = None) -> list[bytes]:
        """Return the answers of all engines (EngineControl.ask). Raises EngineUnavailable."""
        return await asyncio.gather(*(engine.ask(question, timeout_s) for engine in self.all))

    def tell(self, command: Command) -> None:
        """Send a command to all engines. Raises EngineUnavailable if one is unhealthy."""
        for engine in self.all:
            engine.tell(command)

    @property
    def num_answers(self) -> int:
        """Number of unfinished requests that the engines answer."""
        return sum(engine.num_answers for engine in self.all)

    def set_role(self, role: Role) -> None:
        for engine in self.all:
            engine.set_role(role)

    def check_health(self) -> None:
        """Raise EngineUnavailable if an engine is gone, silent, or makes no progress."""
        for engine in self.all:
            engine.check_health()

    async def until_unhealthy(self) -> str:
        """Wait until one engine is unhealthy. Returns what is wrong."""
        waiting = [asyncio.ensure_future(engine.until_unhealthy()) for engine in self.all]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for other in waiting:
                other.cancel()

    def fail(self, reason: str, doing: Callable[[int, bool], Sequence[str]] = lambda number, hangs: ()) -> None:
        """End all open calls with EngineUnavailable, and refuse new ones, because the engines are gone. doing: returns
        what the EngineUnavailable of an engine says, for its number at the start and whether it hangs."""
        for number, engine in enumerate(self.all):
            engine.fail(reason, doing(number, engine.hangs))

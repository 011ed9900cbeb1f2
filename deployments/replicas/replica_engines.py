"""The engines of one replica: one, or several that share experts. They live and die together, unless they go on without
lost ones (`enable_elastic_ep`). Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from deployments.replicas.departure import Statuses
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaStatus
from engine.wire.messages import Command, EngineStatus, Question
from engine.wire.stats.handoff_stats import Role

logger = logging.getLogger(__name__)

PAUSE_S = 300.0  # for engines to go on without a lost one; they may have to read experts from a disk
IDLE_S = 60.0  # without requests, after which a replica that has lost engines restarts
POLL_INTERVAL_S = 1.0

E = TypeVar("E", bound=EngineControl)


class ReplicaEngines(Generic[E]):
    """The engines by id, in the order of their ranks."""

    def __init__(self, engines: Mapping[str, E], goes_on: bool = False):
        """goes_on: whether the others go on if one is lost."""
        self._engines, self._goes_on = dict(engines), goes_on
        self.all = list(self._engines.values())  #: those that are not lost
        self._has_lost = asyncio.Event()

    @property
    def ids(self) -> list[str]:
        return list(self._engines)

    def choose(self, engine_id: str) -> E:
        """Return the engine with this id, even if it is lost; or the one with the fewest requests if there is none."""
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
        """Raise EngineUnavailable if an engine is gone, silent, or makes no progress. If the others can go on without
        it, only the watch over its ranks and `until_hung` decide whether they do."""
        for engine in [] if self._goes_on else self.all:
            engine.check_health()

    def lose(self, number: int, reason: str, doing: Sequence[str] = ()) -> None:
        """Go on without an engine that has died. number: among all engines at the start. Its open calls end with
        EngineLost, so that the ingresses send its requests to others. doing: as for EngineUnavailable."""
        engine = list(self._engines.values())[number]
        self.all.remove(engine)
        logger.warning("replica goes on with %d of %d engines: %s", len(self.all), len(self._engines), reason)
        for other in self.all:
            other.expect_pause(PAUSE_S, len(self._engines) - len(self.all))
        engine.fail(reason, alone=True, doing=doing)
        self._has_lost.set()

    async def until_idle_without_lost(self) -> str:
        """Wait until an engine is lost, and then until there was no request for IDLE_S. Returns why to restart."""
        await self._has_lost.wait()
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(POLL_INTERVAL_S)
            idle_s = 0.0 if any(engine.num_calls for engine in self.all) else idle_s + POLL_INTERVAL_S
        return f"{len(self._engines) - len(self.all)} of its engines were lost, and it has no requests now"

    async def until_unhealthy(self) -> str:
        """Wait until one engine is unhealthy. Returns what is wrong."""
        waiting = {asyncio.ensure_future(engine.until_unhealthy()): engine for engine in self.all}
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    if waiting.pop(ended) in self.all:
                        return ended.result()
        finally:
            for other in waiting:
                other.cancel()

    async def until_hung(self, end_hung: Callable[[], bool]) -> str:
        """Wait until an engine makes no progress without which the others cannot go on. Returns what is wrong.
        end_hung: function that loses engines that hang, and returns whether there were any."""
        while True:
            reason = await self.until_unhealthy()
            if not end_hung():
                return reason

    def fail(self, reason: str, doing: Callable[[int, bool], Sequence[str]] = lambda number, hangs: ()) -> None:
        """End all open calls with EngineUnavailable, and refuse new ones, because the engines are gone. doing: returns
        what the EngineUnavailable of an engine says, for its number at the start and whether it hangs."""
        for number, engine in enumerate(self._engines.values()):
            if engine in self.all:
                engine.fail(reason, doing=doing(number, engine.hangs))

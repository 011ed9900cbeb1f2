"""The engines of one replica: one, or several that share experts. They live and die together. Independent of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaStatus

E = TypeVar("E", bound=EngineControl)


class ReplicaEngines(Generic[E]):
    """The engines by id, in the order of their ranks."""

    def __init__(self, engines: Mapping[str, E]):
        self._engines = dict(engines)
        self.all = list(self._engines.values())

    def choose(self, engine_id: str) -> E:
        """Return the engine with this id, or the one with the fewest requests if there is none."""
        return self._engines.get(engine_id) or min(self.all, key=lambda engine: engine.num_answers)

    def statuses(self) -> list[ReplicaStatus]:
        """Return the newest status of each engine. Raises EngineUnavailable if one is unhealthy."""
        return [engine.status() for engine in self.all]

    def reset_prefix_cache(self) -> None:
        for engine in self.all:
            engine.reset_prefix_cache()

    def release_holds(self, name: str, client: str | None) -> None:
        for engine in self.all:
            engine.release_holds(name, client)

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

    def fail(self, reason: str) -> None:
        """End all open calls with EngineUnavailable, and refuse new ones, because the engines are gone."""
        for engine in self.all:
            engine.fail(reason)

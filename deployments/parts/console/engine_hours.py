"""What engines spend their time on in each hour. Engines report totals, which are looked at once a minute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from deployments.replicas.pools import EnginePool, ModelReplicas, ReplicaStatus
from engine.clock import SYSTEM_CLOCK
from engine.wire.parts.costs import CostStats

logger = logging.getLogger(__name__)

LOOK_S = 60.0
HOUR_S = 3600.0
KEEP_S = 24 * HOUR_S


class EngineHours:
    """Seconds of the engines of all models. What an engine has spent between two looks is spread evenly over the time
    between them, and what it had spent before the first look over its life."""

    def __init__(self, pools: Mapping[str, EnginePool], wall: Callable[[], float] = SYSTEM_CLOCK.wall):
        """pools: by model name. wall: returns seconds since 1970."""
        self._pools, self._wall = pools, wall
        self.hours: dict[float, dict[str, float]] = {}
        """Seconds of each CostLine, by the start of the hour in seconds since 1970. The last 24 hours are kept."""
        self.prompt_token_s: dict[str, float] = {}
        """What a prompt token costs in the engines of each model, in seconds; models of which that is known."""
        self._seen: dict[str, tuple[float, dict[str, float]]] = {}  # time and totals, by engine

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Look regularly inside the block."""
        task = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            task.cancel()

    async def look(self) -> None:
        self.observe(await ModelReplicas.of_all(self._pools))

    def observe(self, replicas: Sequence[ModelReplicas]) -> None:
        """Count what all engines have spent since they were seen the last time."""
        now = self._wall()
        for model in replicas:
            costs = [s.stats.prompt_seconds_per_token for s in model.all if s.stats.prompt_seconds_per_token]
            if costs:
                self.prompt_token_s[model.model] = sum(costs) / len(costs)
            for status in model.all:
                self._count(status, now)
        self.hours = {start: seconds for start, seconds in self.hours.items() if start > now - KEEP_S - HOUR_S}
        self._seen = {engine: seen for engine, seen in self._seen.items() if seen[0] > now - KEEP_S}

    def _count(self, status: ReplicaStatus, now: float) -> None:
        if (spent := status.stats.record(CostStats)) is None:
            return
        totals = spent.seconds
        since, before = self._seen.get(status.engine_id, (now - sum(totals.values()), {}))
        if any(total < before.get(line, 0.0) for line, total in totals.items()):  # it has started again
            since, before = now - sum(totals.values()), {}
        self._seen[status.engine_id] = now, totals
        for start, part in parts(since, now):
            seconds = self.hours.setdefault(start, {})
            for line, total in totals.items():
                seconds[line] = seconds.get(line, 0.0) + part * (total - before.get(line, 0.0))

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001  whatever it is, the next look may succeed
                logger.warning("the console does not know what engines spend their time on: %r", error)
            await asyncio.sleep(LOOK_S)


def parts(since: float, until: float) -> Iterator[tuple[float, float]]:
    """Yield the start of each hour in which a time lies, and the fraction of the time in this hour. Hours that are no
    longer kept are left out."""
    length = until - since
    if length <= 0:
        return
    start = max(since, until - KEEP_S) // HOUR_S * HOUR_S
    while start < until:
        inside = min(until, start + HOUR_S) - max(since, start)
        yield start, inside / length
        start += HOUR_S

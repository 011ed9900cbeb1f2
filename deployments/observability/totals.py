"""Log line of totals, one for each interval with activity."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.observability.telemetry import Telemetry
from deployments.replicas.pools import EnginePool, ModelReplicas
from engine.wire.stats.engine_stats import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all engines that answer, since the start of each."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class TotalsLog:
    """Logs totals. It polls the engines only before and after intervals in which this ingress has a request."""

    def __init__(self, pools: Mapping[str, EnginePool], telemetry: Telemetry):
        """pools: by model name."""
        self._pools, self._telemetry = pools, telemetry
        self._before = Totals()

    async def run(self) -> None:
        """Log until cancelled."""
        timelines, polled = self._telemetry.timelines, False
        while True:
            if not (timelines.num_live or timelines.begun.is_set()):
                await timelines.begun.wait()
                polled = False  # poll anew, so that requests of other ingresses meanwhile do not count
            try:
                if not polled:
                    self._before, _ = await self._poll()
                await asyncio.sleep(INTERVAL_S)
                timelines.begun.clear()
                await self.log()
                polled = True
            except Exception as error:  # noqa: BLE001  whatever it is, the next poll may succeed
                logger.warning("the totals are unknown: %r", error)
                polled = False
                await asyncio.sleep(INTERVAL_S)

    async def log(self) -> None:
        totals, stats = await self._poll()
        before, self._before = self._before, totals
        queried = max(0, totals.queried_tokens - before.queried_tokens)
        logger.info(
            "totals prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d kv_use=%.3f hit_rate=%.3f",
            max(0, totals.prompt_tokens - before.prompt_tokens) / INTERVAL_S,
            max(0, totals.output_tokens - before.output_tokens) / INTERVAL_S,
            sum(s.running for s in stats),
            sum(s.waiting for s in stats) + sum(m.waiting for m in self._telemetry.stats.models.values()),
            sum(s.blocks_used for s in stats) / max(1, sum(s.blocks_total for s in stats)),
            max(0, totals.hit_tokens - before.hit_tokens) / queried if queried else 0.0,
        )

    async def _poll(self) -> tuple[Totals, list[EngineStats]]:
        """Return the totals of the decode engines, and the statistics from which they were computed."""
        stats = [status.stats for model in await ModelReplicas.of_all(self._pools) for status in model.answering]
        totals = Totals(
            prompt_tokens=sum(s.prompt_tokens for s in stats),
            output_tokens=sum(s.generation_tokens for s in stats),
            queried_tokens=sum(s.prefix_queried_tokens for s in stats),
            hit_tokens=sum(s.prefix_hit_tokens for s in stats),
        )
        return totals, stats

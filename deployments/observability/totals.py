"""Log line of totals, one for each interval with activity."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from deployments.observability.telemetry import Telemetry
from deployments.replicas.pools import EnginePool, ModelReplicas
from engine.wire.stats.engine_stats import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
TOTALS = ("prompt_tokens", "generation_tokens", "prefix_queried_tokens", "prefix_hit_tokens")


class TotalsLog:
    """Logs totals. It polls the engines only before and after intervals in which this ingress has a request."""

    def __init__(self, pools: Mapping[str, EnginePool], telemetry: Telemetry):
        """pools: by model name."""
        self._pools, self._telemetry = pools, telemetry
        self._before = Counter[str]()

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
        new, self._before = totals - self._before, totals  # without those that a restart of an engine made smaller
        logger.info(
            "totals prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d kv_use=%.3f hit_rate=%.3f",
            new["prompt_tokens"] / INTERVAL_S,
            new["generation_tokens"] / INTERVAL_S,
            sum(s.running for s in stats),
            sum(s.waiting for s in stats) + sum(m.waiting for m in self._telemetry.stats.models.values()),
            sum(s.blocks_used for s in stats) / max(1, sum(s.blocks_total for s in stats)),
            new["prefix_hit_tokens"] / max(1, new["prefix_queried_tokens"]),
        )

    async def _poll(self) -> tuple[Counter[str], list[EngineStats]]:
        """Return the totals of the decode engines since the start of each, and the statistics that they are from."""
        stats = [status.stats for model in await ModelReplicas.of_all(self._pools) for status in model.answering]
        return Counter({name: sum(getattr(each, name) for each in stats) for name in TOTALS}), stats

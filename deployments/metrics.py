"""Prometheus text, under vLLM's names where it has one.

Totals are the engines' own, so it does not matter which ingress is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.engine_pool import EnginePool
from deployments.token_channel import TokenChannel
from engine.errors import EngineUnavailable
from engine.messages import EngineStats, EngineStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
LABELS = ["model_name", "engine"]
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens computed or found in the cache.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "vllm:num_preemptions": ("Requests that lost their KV blocks to others.", "preemptions"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "manta:steps": ("Steps the engine has computed.", "steps"),
}
GAUGES = {
    "vllm:num_requests_running": ("Requests that hold KV blocks.", "running"),
    "vllm:num_requests_waiting": ("Requests in the engine's queue.", "waiting"),
}


async def render_metrics(pools: Mapping[str, EnginePool], channel: TokenChannel) -> bytes:
    """pools: by model name. A model without a healthy replica has `manta_up` 0 and nothing else."""
    found: dict[str, list[EngineStatus]] = {}
    for name, pool in pools.items():
        try:
            found[name] = await pool.statuses()
        except EngineUnavailable:
            found[name] = []
    registry = CollectorRegistry()
    registry.register(_Snapshot(found, channel.dropped))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, statuses: Mapping[str, list[EngineStatus]], dropped: int):
        self._statuses, self._dropped = statuses, dropped

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("manta_up", "Healthy replicas.", labels=["model_name"])
        for name, statuses in self._statuses.items():
            up.add_metric([name], len(statuses))
        yield up
        dropped = CounterMetricFamily("manta_dropped_deltas", "Token deltas that came for no open request.")
        dropped.add_metric([], self._dropped)
        yield dropped
        for metric, (text, field) in COUNTERS.items():
            counter = CounterMetricFamily(metric, text, labels=LABELS)
            for labels, stats in self._engines():
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        for metric, (text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(metric, text, labels=LABELS)
            for labels, stats in self._engines():
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        yield from self._blocks()
        finished = CounterMetricFamily("vllm:request_success", "Ended requests.", labels=[*LABELS, "finished_reason"])
        for labels, stats in self._engines():
            for reason, count in stats.finished.items():
                finished.add_metric([*labels, reason], count)
        yield finished

    def _blocks(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", labels=LABELS)
        blocks = GaugeMetricFamily("manta_kv_blocks", "KV blocks by state.", labels=[*LABELS, "state"])
        for labels, stats in self._engines():
            usage.add_metric(labels, stats.blocks_used / stats.blocks_total)
            for state in ("free", "cached", "used"):
                blocks.add_metric([*labels, state], getattr(stats, f"blocks_{state}"))
        yield usage
        yield blocks

    def _engines(self) -> Iterator[tuple[list[str], EngineStats]]:
        for name, statuses in self._statuses.items():
            for status in statuses:
                yield [name, status.engine_id], status.stats

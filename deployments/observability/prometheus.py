"""Prometheus text, under vLLM's names where the meaning is the same (docs/observability.md has the table).

Two kinds of series. What engines know has the label `engine`, and what ingresses know `ingress`: each keeps its own
counts from its start, and every scrape asks all of them, so it does not matter which ingress is scraped. A replica
that ends takes its series along; nothing is added up over replicas here, so no counter ever runs backwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deployments.observability.handoff_metrics import handoff_metrics
from deployments.observability.routing_metrics import routing_metrics
from deployments.observability.stats import IngressStats, ModelStats, RouteStats
from deployments.observability.telemetry import Telemetry
from deployments.replicas.pools import EnginePool, ReplicaStatus, all_statuses
from deployments.routing.stats import RoutingStats
from engine.wire.histogram import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINE_LABELS = ["model_name", "engine"]
MODEL_LABELS = ["model_name", "ingress"]
ROUTE_LABELS = ["handler", "method", "ingress"]
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens computed or found in the cache.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "vllm:num_preemptions": ("Requests that lost their KV blocks to others.", "preemptions"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
}
GAUGES = {
    "vllm:num_requests_running": ("Requests that hold KV blocks.", "running"),
    "vllm:num_requests_waiting": ("Requests in the engine's queue.", "waiting"),
}
REQUEST_HISTOGRAMS = {
    "inter_token_latency_seconds": "From one token of a request to the next.",
    "request_time_per_output_token_seconds": "Mean over a request's tokens after the first.",
    "request_queue_time_seconds": "From arrival in the engine to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "Tokens that a request may generate.",
    "request_num_preemptions": "How often a request lost its KV blocks.",
}
MODEL_HISTOGRAMS = {
    "time_to_first_token_seconds": "From the HTTP request to the first token.",
    "e2e_request_latency_seconds": "From the HTTP request to the last token.",
    "request_params_n": "Sequences asked for per prompt.",
}


async def render_metrics(pools: Mapping[str, EnginePool], telemetry: Telemetry) -> bytes:
    """pools: by model name. A model without a healthy replica has `manta_up` 0 and no series of engines."""
    replicas, ingresses = await asyncio.gather(
        asyncio.gather(*(_Replicas.of(name, pool) for name, pool in pools.items())), telemetry.all_stats()
    )
    registry = CollectorRegistry()
    registry.register(_Snapshot(replicas, ingresses))
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class _Replicas:
    """Of one model: those that answer requests, and those that compute prompts for them."""

    model: str
    decode: list[ReplicaStatus]
    prefill: list[ReplicaStatus]
    asleep: bool

    @classmethod
    async def of(cls, model: str, pool: EnginePool) -> _Replicas:
        decode, prefill = await all_statuses(pool)
        return cls(model, decode, prefill, not decode and await pool.asleep())


class _Snapshot(Collector):
    def __init__(self, replicas: Sequence[_Replicas], ingresses: Sequence[IngressStats]):
        self._replicas, self._ingresses = replicas, ingresses
        self._decode = [([r.model, status.engine_id], status) for r in replicas for status in r.decode]
        prefill = [([r.model, status.engine_id], status) for r in replicas for status in r.prefill]
        self._engines = self._decode + prefill

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("manta_up", "Healthy replicas.", labels=["model_name"])
        asleep = GaugeMetricFamily("manta_asleep", "1 while it is scaled to zero.", labels=["model_name"])
        for replicas in self._replicas:
            up.add_metric([replicas.model], len(replicas.decode))
            asleep.add_metric([replicas.model], replicas.asleep)
        yield from (up, asleep)
        yield from self._engine_requests()
        yield from self._engine_gauges()
        yield from handoff_metrics(self._engines)
        yield from routing_metrics(self._routers())
        yield from self._requests()
        yield from self._http()

    def _engine_requests(self) -> Iterator[Metric]:
        """Without engines that compute prompts for others: a request counts once, however many work for it."""
        for metric, (text, field) in COUNTERS.items():
            counter = CounterMetricFamily(metric, text, labels=ENGINE_LABELS)
            for labels, status in self._decode:
                counter.add_metric(labels, getattr(status.stats, field))
            yield counter
        for name, text in REQUEST_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=ENGINE_LABELS)
            for labels, status in self._decode:
                _add(family, labels, status.stats.histograms[name])
            yield family
        ended = CounterMetricFamily(
            "manta_engine_requests_ended", "Requests, as their engine saw their end.", labels=[*ENGINE_LABELS, "reason"]
        )
        for labels, status in self._decode:
            for reason, count in status.stats.finished.items():
                ended.add_metric([*labels, reason], count)
        yield ended

    def _engine_gauges(self) -> Iterator[Metric]:
        for metric, (text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(metric, text, labels=ENGINE_LABELS)
            for labels, status in self._engines:
                gauge.add_metric(labels, getattr(status.stats, field))
            yield gauge
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", labels=ENGINE_LABELS
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", labels=ENGINE_LABELS
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*ENGINE_LABELS, "block_size", "num_gpu_blocks"]
        )
        for labels, stats in ((labels, status.stats) for labels, status in self._engines):
            _add(steps, labels, stats.histograms["iteration_tokens_total"])
            usage.add_metric(labels, stats.blocks_used / stats.blocks_total)
            info.add_metric([*labels, str(stats.block_size), str(stats.blocks_total)], 1)
        yield from (steps, usage, info)

    def _requests(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Ended requests, as their clients saw it.",
            labels=[*MODEL_LABELS, "finished_reason"],
        )
        for labels, stats in self._models():
            for reason, count in stats.finished.items():
                ended.add_metric([*labels, reason], count)
        yield ended
        for name, text in MODEL_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=MODEL_LABELS)
            for labels, stats in self._models():
                _add(family, labels, stats.histograms[name])
            yield family
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused with 429.", labels=[*MODEL_LABELS, "reason"]
        )
        waiting = GaugeMetricFamily(
            "manta_ingress_requests_waiting", "Sequences not yet admitted.", labels=MODEL_LABELS
        )
        for labels, stats in self._models():
            refused.add_metric([*labels, "queue_full"], stats.refused)
            waiting.add_metric(labels, stats.waiting)
        yield refused
        yield waiting
        replays = CounterMetricFamily(
            "manta_request_replays", "Attempts to go on in another engine.", labels=[*MODEL_LABELS, "reason"]
        )
        for labels, stats in self._models():
            for reason, count in stats.replays.items():
                replays.add_metric([*labels, reason], count)
        yield replays
        dropped = CounterMetricFamily(
            "manta_dropped_deltas", "Token deltas that came for no open request.", labels=["ingress"]
        )
        for ingress in self._ingresses:
            dropped.add_metric([ingress.ingress_id], ingress.dropped_deltas)
        yield dropped

    def _http(self) -> Iterator[Metric]:
        """As prometheus-fastapi-instrumentator has them; `status` is a class there (2xx), so the exact one is ours."""
        requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=[*ROUTE_LABELS, "status"])
        statuses = CounterMetricFamily("manta_http_responses", "HTTP answers.", labels=[*ROUTE_LABELS, "status"])
        seconds = HistogramMetricFamily("http_request_duration_seconds", "Until all was sent.", labels=ROUTE_LABELS)
        received = SummaryMetricFamily("http_request_size_bytes", "Bodies of requests.", labels=ROUTE_LABELS)
        sent = SummaryMetricFamily("http_response_size_bytes", "Bodies of answers.", labels=ROUTE_LABELS)
        for labels, route in self._routes():
            for kind in (2, 4, 5):  # also where there were none yet: a series that begins with its first error hides it
                count = sum(n for status, n in route.statuses.items() if status // 100 == kind)
                requests.add_metric([*labels, f"{kind}xx"], count)
            for status, count in sorted(route.statuses.items()):
                statuses.add_metric([*labels, str(status)], count)
            _add(seconds, labels, route.seconds)
            received.add_metric(labels, route.seconds.count, route.request_bytes)
            sent.add_metric(labels, route.seconds.count, route.response_bytes)
        yield from (requests, statuses, seconds, received, sent)

    def _models(self) -> Iterator[tuple[list[str], ModelStats]]:
        for ingress in self._ingresses:
            for name, stats in ingress.models.items():
                yield [name, ingress.ingress_id], stats

    def _routers(self) -> Iterator[tuple[dict[str, str], RoutingStats]]:
        """pool: to which they send."""
        for (model, ingress_id), stats in self._models():
            yield {"model_name": model, "ingress": ingress_id, "pool": "decode"}, stats.routing
        for (model, engine_id), status in self._decode:
            if status.prefill_routing is not None:
                yield {"model_name": model, "engine": engine_id, "pool": "prefill"}, status.prefill_routing

    def _routes(self) -> Iterator[tuple[list[str], RouteStats]]:
        for ingress in self._ingresses:
            for key, stats in ingress.routes.items():
                method, path = key.split(" ", 1)
                yield [path, method, ingress.ingress_id], stats


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets, below = [], 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        below += count
        buckets.append((floatToGoString(bound), below))
    family.add_metric(labels, buckets, histogram.sum)

"""Prometheus text, under vLLM's names where the meaning is the same (docs/observability.md has the table).

There are two kinds of series: those of engines have the label `engine`, those of ingresses `ingress`. Each engine and
ingress keeps its own counts from its start, and every scrape asks all of them, so it does not matter which ingress is
scraped. When a replica ends, its series end too. Nothing is summed over replicas, so no counter ever decreases. A
scrape of one node contains only its own engines and ingresses, so each series belongs to exactly one node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.core import SummaryMetricFamily as Summary
from prometheus_client.registry import Collector

from deployments.observability.engine_metrics import (
    LABELS,
    STATUS,
    PartMetrics,
    Row,
    collect,
    handoff_metrics,
    histograms,
    load_metrics,
    part_metrics,
    request_metrics,
)
from deployments.observability.stats import IngressStats, ModelStats, RouteStats
from deployments.observability.telemetry import Telemetry
from deployments.observability.tracing import SERVICE
from deployments.replicas.pools import EnginePool, ModelReplicas
from deployments.routing.stats import RoutingStats
from engine.wire.stats.histogram import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
MODEL_LABELS = ["model_name", "ingress"]
ROUTE_LABELS = ["handler", "method", "ingress"]


def _by_key(field: str) -> Callable[[ModelStats], dict[str, float]]:
    return lambda model: {key: getattr(used, field) for key, used in model.usage.items()}


REPLICAS: list[Row] = [
    (Gauge, "manta_up", "Healthy replicas.", lambda replicas: len(replicas.decode)),
    (Gauge, "manta_asleep", "1 while the model is scaled to zero.", "asleep"),
]
MODELS: list[Row] = [
    (Counter, "vllm:request_success", "Ended requests, as their clients saw it.", "finished", "finished_reason"),
    *histograms(
        {
            "time_to_first_token_seconds": "From the HTTP request to the first token.",
            "e2e_request_latency_seconds": "From the HTTP request to the last token.",
            "request_params_n": "Sequences requested per prompt.",
        }
    ),
    (
        Counter,
        "vllm:admission_rejections",
        "Requests refused with 429.",
        lambda model: {"queue_full": model.refused, "first_token_late": model.refused_late},
        "reason",
    ),
    (
        HistogramMetricFamily,
        "manta_latency_ratio",
        "What requests took, divided by what was expected.",
        "latency_ratios",
        "latency",
        "waits",
    ),
    (
        Counter,
        "manta_latency_bounds",
        "Requests by whether they took no longer than the bound told for them.",
        "latency_bounds",
        "latency",
        "waits",
        "outcome",
    ),
    (
        Gauge,
        "manta_latency_margin",
        "The bound of the next request, divided by what is expected.",
        "latency_margins",
        "latency",
        "waits",
    ),
    (Gauge, "manta_ingress_requests_waiting", "Sequences not yet admitted.", "waiting"),
    (Counter, "manta_request_replays", "Attempts to continue in another engine.", "replays", "reason"),
    (
        HistogramMetricFamily,
        "manta_move_pause_seconds",
        "Seconds without a token while a sequence moves to another engine.",
        "move_pauses",
    ),
    (Counter, "manta_adapter_requests", "Ended requests of LoRA adapters.", "adapters", "adapter"),
    *(
        (Counter, f"manta_key_{name}", f"{text} of ended requests, by API key.", _by_key(field), "key")
        for name, text, field in (
            ("prompt_tokens", "Prompt tokens", "prompt_tokens"),
            ("output_tokens", "Output tokens", "output_tokens"),
            ("compute_seconds", "Engine seconds", "compute_s"),
            ("wasted_seconds", "Engine seconds for tokens that were computed again", "wasted_s"),
            ("cost", "Money", "cost"),
        )
    ),
    (Counter, "manta_sdc_checks", "Answers that were computed again, and compared.", "sdc_checks", "result"),
]

ANONYMOUS = [row for row in MODELS if "key" not in row]


def _by_operation(time: str) -> Callable[[ModelStats], dict[str, dict[str, Histogram]]]:
    return lambda model: {name: {SERVICE: getattr(stats, time)} for name, stats in model.operations.items()}


# OpenTelemetry's names and labels, as its collectors write them for Prometheus
GEN_AI: list[Row] = [
    (
        HistogramMetricFamily, f"gen_ai_server_{time}_seconds", text, _by_operation(time),
        "gen_ai_operation_name", "gen_ai_provider_name",
    )
    for time, text in {
        "request_duration": "From the HTTP request to the last token.",
        "time_to_first_token": "From the HTTP request to the first token.",
        "time_per_output_token": "Time per token after the first.",
    }.items()
]  # fmt: skip
INGRESSES: list[Row] = [
    (Counter, "manta_dropped_deltas", "Token deltas that arrived for no open request.", "dropped_deltas"),
    (Counter, "manta_store_errors", "Calls of `ingress.store` that failed.", "store_errors", "reason"),
    (
        Counter,
        "manta_ingress_refused_messages",
        "Messages that sockets of ingresses refused.",
        "refused",
        "socket",
        "reason",
    ),
]


def _status_classes(route: RouteStats) -> dict[str, int]:
    """Return counts of all status classes, including zeros: if a series began with its first error, a rate would not
    show that error."""
    return {f"{kind}xx": sum(n for status, n in route.statuses.items() if status // 100 == kind) for kind in (2, 4, 5)}


# prometheus-fastapi-instrumentator's series. Its `status` is a class (2xx), so the one with exact statuses is our own
ROUTES: list[Row] = [
    (Counter, "http_requests", "HTTP requests.", _status_classes, "status"),
    (Counter, "manta_http_responses", "HTTP answers.", lambda route: dict(sorted(route.statuses.items())), "status"),
    (HistogramMetricFamily, "http_request_duration_seconds", "Time until the whole response was sent.", "seconds"),
    (Summary, "http_request_size_bytes", "Bodies of requests.", lambda r: (r.seconds.count, r.request_bytes)),
    (Summary, "http_response_size_bytes", "Bodies of answers.", lambda r: (r.seconds.count, r.response_bytes)),
]
ROUTING_COUNTERS = {
    "manta_routing_estimated_cached_tokens": (
        "Prompt tokens that the router expected to be cached.",
        "estimated_tokens",
    ),
    "manta_routing_cached_tokens": ("Prompt tokens of the same calls that were in fact cached.", "cached_tokens"),
    "manta_routing_drift_tokens": (
        "Sum of the differences between estimated and actual cached tokens.",
        "drift_tokens",
    ),
}


class Metrics:
    """Renders scrapes, one at a time and outside the event loop, so that streams go on meanwhile. Scrapes that come
    while one of their kind is rendered get the same text."""

    def __init__(self, pools: Mapping[str, EnginePool], telemetry: Telemetry, parts: Sequence[PartMetrics] = ()):
        """pools: by model name."""
        self._pools, self._telemetry, self._parts = pools, telemetry, parts
        self._rendering: dict[tuple[str | None, bool], asyncio.Task[bytes]] = {}
        self._one = asyncio.Lock()

    async def text(self, node: str | None = None, *, by_key: bool = True) -> bytes:
        """Return the text of one scrape. node: Ray's id of the only node to ask; None for all. by_key: whether it tells
        what each API key has used.

        A model without a healthy replica has `manta_up` 0 and no series of engines.
        """
        kind = node, by_key
        if (task := self._rendering.get(kind)) is None:
            task = self._rendering[kind] = asyncio.create_task(self._render(node, by_key))
            task.add_done_callback(lambda _: self._rendering.pop(kind))
        return await asyncio.shield(task)

    async def _render(self, node: str | None, by_key: bool) -> bytes:
        async with self._one:
            replicas, ingresses = await asyncio.gather(ModelReplicas.of_all(self._pools), self._telemetry.all_stats())
            if node is not None:
                replicas = [model.on(node) for model in replicas]
                ingresses = [stats for stats in ingresses if stats.node == node]
            # a copy, since this ingress goes on counting
            ingresses = msgspec.msgpack.decode(msgspec.msgpack.encode(ingresses), type=list[IngressStats])
            registry = CollectorRegistry()
            registry.register(_Snapshot(replicas, ingresses, MODELS if by_key else ANONYMOUS, self._parts))
            return await asyncio.to_thread(generate_latest, registry)


class _Snapshot(Collector):
    """Answers of all replicas and ingresses to one scrape."""

    def __init__(
        self,
        replicas: Sequence[ModelReplicas],
        ingresses: Sequence[IngressStats],
        of_models: Sequence[Row],
        parts: Sequence[PartMetrics],
    ):
        self._replicas, self._ingresses, self._of_models, self._parts = replicas, ingresses, of_models, parts
        self._answering = [([r.model, status.engine_id], status) for r in replicas for status in r.answering]
        self._decode = [([r.model, status.engine_id], status) for r in replicas for status in r.decode]
        self._prefill = [([r.model, status.engine_id], status) for r in replicas for status in r.prefill]
        self._encode = [([r.model, status.engine_id], status) for r in replicas for status in r.encode]
        self._models = [([name, i.ingress_id], stats) for i in ingresses for name, stats in i.models.items()]

    def collect(self) -> Iterator[Metric]:
        yield from collect(REPLICAS, ["model_name"], [([r.model], r) for r in self._replicas])
        yield from request_metrics(self._answering)
        others = [*self._decode, *self._prefill]
        yield from load_metrics([*others, *self._encode])
        yield from collect(STATUS, LABELS, [*others, *self._encode])
        yield from part_metrics(self._parts, self._answering, [*others, *self._encode])
        yield from handoff_metrics(others, self._encode)
        yield from self._routing()
        yield from collect(self._of_models, MODEL_LABELS, self._models)
        yield from collect(GEN_AI, ["gen_ai_request_model", "ingress"], self._models)
        yield from collect(INGRESSES, ["ingress"], [([i.ingress_id], i) for i in self._ingresses])
        routes = [
            ([*reversed(name.split(" ", 1)), i.ingress_id], r) for i in self._ingresses for name, r in i.routes.items()
        ]
        yield from collect(ROUTES, ROUTE_LABELS, routes)

    def _routing(self) -> Iterator[Metric]:
        """Yield the routing counters. Labels differ, since routers to decode engines run in ingresses, and all other
        routers in replicas."""
        text = "Sequences and prefill requests by the reason for the choice of their engine."
        routed = Counter("manta_routed_requests", text)
        adapters = Counter(
            "manta_routed_adapter_requests",
            "Sequences and prefill requests with a LoRA adapter, by whether their engine had loaded it.",
        )
        tokens = {field: Counter(name, text) for name, (text, field) in ROUTING_COUNTERS.items()}
        for labels, stats in self._routers():
            for reason, count in stats.routed.items():
                routed.add_sample(f"{routed.name}_total", {**labels, "policy": stats.policy, "reason": reason}, count)
            for held, count in stats.adapters.items():
                adapters.add_sample(f"{adapters.name}_total", {**labels, "adapter": held}, count)
            for field, counter in tokens.items():
                counter.add_sample(f"{counter.name}_total", labels, getattr(stats, field))
        yield from (routed, adapters, *tokens.values(), self._broken_holds())

    def _broken_holds(self) -> Metric:
        """Return the number of broken holds of each model: the highest count of any ingress, not the sum, because every
        ingress counts all broken holds that it knew of."""
        broken = Counter("manta_holds_broken", "Holds whose replica stopped before they ended.")
        for model in dict.fromkeys(model for (model, _), _ in self._models):
            counts = [stats.routing.holds_broken for (name, _), stats in self._models if name == model]
            broken.add_sample(f"{broken.name}_total", {"model_name": model}, max(counts))
        return broken

    def _routers(self) -> Iterator[tuple[dict[str, str], RoutingStats]]:
        for (model, ingress_id), stats in self._models:
            yield {"model_name": model, "ingress": ingress_id, "pool": "decode"}, stats.routing
        for (model, engine_id), status in [*self._decode, *self._prefill]:
            for pool, routing in status.routing.items():
                yield {"model_name": model, "engine": engine_id, "pool": pool}, routing

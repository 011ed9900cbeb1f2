"""Counts of one ingress, sent between ingresses so that any of them can answer for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from deployments.billing.totals import OTHERS, UsageTotals
from deployments.observability.timeline import SequenceTimeline
from deployments.routing.stats import RoutingStats
from engine.wire.stats.histogram import SECONDS, TOKENS, Histogram

REPLAY_REASONS = ("engine_unavailable", "tokens_lost", "other_model", "overloaded", "moved")
FINISHED_REASONS = ("stop", "length", "abort", "error")
T = TypeVar("T")
MAX_NAMES = 100  # adapters, and API keys, that are counted by their names


DURATIONS = [0.01 * 2**i for i in range(14)]
FIRST_TOKENS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
RATIOS = [0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0]
LATENCIES = ("first_token", "per_token")
WAITS = ("no", "yes")
OUTPUT_TOKENS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]


class OperationStats(msgspec.Struct):
    """Durations of one operation of a model, in seconds, with names and bounds of OpenTelemetry's `gen_ai.server`."""

    request_duration: Histogram = msgspec.field(default_factory=lambda: Histogram.over(DURATIONS))
    time_to_first_token: Histogram = msgspec.field(default_factory=lambda: Histogram.over(FIRST_TOKENS))
    time_per_output_token: Histogram = msgspec.field(default_factory=lambda: Histogram.over(OUTPUT_TOKENS))

    def observe(self, ended: SequenceTimeline) -> None:
        """Count a sequence that has ended without an error."""
        assert ended.seconds is not None
        self.request_duration.observe(ended.seconds)
        if ended.first_token_s is None or not ended.output_tokens:
            return
        self.time_to_first_token.observe(ended.first_token_s)
        if ended.output_tokens > 1:
            self.time_per_output_token.observe((ended.seconds - ended.first_token_s) / (ended.output_tokens - 1))


def _by_latency(make: Callable[[], T]) -> dict[str, dict[str, T]]:
    return {latency: {waits: make() for waits in WAITS} for latency in LATENCIES}


class ModelStats(msgspec.Struct):
    """Counts of one model's sequences."""

    refused: int = 0  #: HTTP requests that were not admitted, because the queue was full
    refused_late: int = 0  #: HTTP requests that were not admitted, because their first token would come too late
    waiting: int = 0  #: sequences that wait for admission now
    routing: RoutingStats = msgspec.field(default_factory=RoutingStats)
    finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    """Ended sequences by the reason that their clients saw: `stop` includes stop strings, which no engine detects;
    `abort` means that the client left; `error` that it got an error."""
    replays: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REPLAY_REASONS, 0))
    """Attempts to continue in another engine, by the error that ended the previous attempt."""
    move_pauses: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    """Seconds without a token of sequences that moved to another engine."""
    adapters: dict[str, int] = {}
    """Ended sequences of LoRA adapters: by name for the first MAX_NAMES, the rest as OTHERS."""
    usage: dict[str, UsageTotals] = {}
    """What ended sequences have used, by the name of the API key, bounded likewise; empty for clients without a key."""
    sdc_checks: dict[str, int] = msgspec.field(default_factory=lambda: {"equal": 0, "different": 0})
    """Answers recomputed to detect silent data corruption, by outcome (deployments/parts/sdc_check/sdc_check.py)."""
    histograms: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {
            "time_to_first_token_seconds": Histogram.over(SECONDS),
            "e2e_request_latency_seconds": Histogram.over(SECONDS),
            "request_params_n": Histogram.over(TOKENS),
        }
    )
    """Histograms by vLLM's names."""
    operations: dict[str, OperationStats] = {}
    """By gen_ai.operation.name."""
    latency_ratios: dict[str, dict[str, Histogram]] = msgspec.field(
        default_factory=lambda: _by_latency(lambda: Histogram.over(RATIOS))
    )
    """What requests took divided by what was expected, by latency, and by whether they waited for admission
    (deployments/frontend/calibration.py)."""
    latency_bounds: dict[str, dict[str, dict[str, int]]] = msgspec.field(
        default_factory=lambda: _by_latency(lambda: {"within": 0, "beyond": 0, "unknown": 0})
    )
    """Requests by whether they took no longer than the bound that was told for them, likewise."""
    latency_margins: dict[str, dict[str, float]] = msgspec.field(default_factory=lambda: _by_latency(lambda: math.inf))
    """The bound of the next request, divided by what is expected, likewise; infinite while unknown."""

    def count_adapter(self, name: str) -> None:
        label = name if name in self.adapters or len(self.adapters) < MAX_NAMES else OTHERS
        self.adapters[label] = self.adapters.get(label, 0) + 1

    def count_usage(self, key: str, used: UsageTotals) -> None:
        label = key if key in self.usage or len(self.usage) < MAX_NAMES else OTHERS
        self.usage.setdefault(label, UsageTotals()).add(used)

    def operation(self, name: str) -> OperationStats:
        return self.operations.setdefault(name, OperationStats())


class RouteStats(msgspec.Struct):
    """Counts of the answered HTTP requests of one route and method."""

    statuses: dict[int, int] = {}  #: number of requests by HTTP status
    seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    request_bytes: int = 0
    response_bytes: int = 0


class IngressStats(msgspec.Struct):
    """Counts since the start of one ingress."""

    ingress_id: str
    node: str = ""  #: Ray's id of its node
    models: dict[str, ModelStats] = {}  #: by name
    routes: dict[str, RouteStats] = {}
    """Routes by `METHOD /path`, with the declared path, so that clients cannot add entries."""
    dropped_deltas: int = 0  #: deltas that came for no open request
    store_errors: dict[str, int] = {}
    """Failed calls of the store and corrupt values (deployments/storage)."""
    refused: dict[str, dict[str, int]] = {}
    """Messages and peers that its sockets refused, by socket and reason (engine/distributed/refusals.py)."""

    def model(self, name: str) -> ModelStats:
        return self.models.setdefault(name, ModelStats())

    def answered(self, name: str, status: int, seconds: float, request_bytes: int, response_bytes: int) -> None:
        """Count an HTTP request after its answer, or as much of it as possible, was sent."""
        route = self.routes.setdefault(name, RouteStats())
        route.statuses[status] = route.statuses.get(status, 0) + 1
        route.seconds.observe(seconds)
        route.request_bytes += request_bytes
        route.response_bytes += response_bytes

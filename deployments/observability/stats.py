"""What one ingress counts of its requests. Travels between ingresses, so that any of them can answer for all."""

from __future__ import annotations

import msgspec

from deployments.routing.stats import RoutingStats
from engine.wire.histogram import SECONDS, TOKENS, Histogram

REPLAY_REASONS = ("engine_unavailable", "tokens_lost", "other_model", "overloaded")
FINISHED_REASONS = ("stop", "length", "abort", "error")


class ModelStats(msgspec.Struct):
    """The sequences of one model.

    finished: how many ended, by reason, as their clients saw it: `stop` also for a stop string, which no engine knows
        of; `abort` if the client left; `error` if it was told of one.
    histograms: by vLLM's names.
    replays: attempts to go on in another engine, by the error that the attempt before it ended with.
    refused: HTTP requests that were not admitted. waiting: sequences that wait for admission now.
    routing: how sequences found their engines.
    """

    refused: int = 0
    waiting: int = 0
    routing: RoutingStats = msgspec.field(default_factory=RoutingStats)
    finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    replays: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REPLAY_REASONS, 0))
    histograms: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {
            "time_to_first_token_seconds": Histogram.over(SECONDS),
            "e2e_request_latency_seconds": Histogram.over(SECONDS),
            "request_params_n": Histogram.over(TOKENS),
        }
    )


class RouteStats(msgspec.Struct):
    """The HTTP requests of one route and method that were answered. statuses: how many, by HTTP status."""

    statuses: dict[int, int] = {}
    seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    request_bytes: int = 0
    response_bytes: int = 0


class IngressStats(msgspec.Struct):
    """Counts since the start of one ingress.

    models: by name. routes: by `METHOD /path`, the path as it is declared, so that clients cannot add to them.
    dropped_deltas: deltas that came for no open request.
    """

    ingress_id: str
    models: dict[str, ModelStats] = {}
    routes: dict[str, RouteStats] = {}
    dropped_deltas: int = 0

    def answered(self, name: str, status: int, seconds: float, request_bytes: int, response_bytes: int) -> None:
        route = self.routes.setdefault(name, RouteStats())
        route.statuses[status] = route.statuses.get(status, 0) + 1
        route.seconds.observe(seconds)
        route.request_bytes += request_bytes
        route.response_bytes += response_bytes

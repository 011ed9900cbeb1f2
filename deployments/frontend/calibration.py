"""Compares what requests were expected to take with what they take, and bounds what the next ones will take. Pure: no
clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.frontend.latency_bound import LatencyBound
from deployments.observability.stats import ModelStats

Latency = Literal["first_token", "per_token"]
MIN_EXPECTED_S = 0.001  # an HTTP request takes longer


@dataclass(frozen=True, slots=True)
class ToldLatency:
    """What was expected of one request."""

    expected_s: float
    bound_s: float
    """Infinite if none is known."""


@dataclass(slots=True, eq=False, kw_only=True)
class ForecastRequest:
    """A request with what was expected of it, and its tokens so far. Times are on the clock of the caller."""

    asked_at: float
    waits: bool
    """Whether it had to wait for admission."""
    first_token: ToldLatency | None
    per_token: ToldLatency | None
    first_at: float | None = None
    last_at: float = 0.0
    num_tokens: int = 0

    def add(self, num_tokens: int, now: float) -> None:
        """Record tokens that have come."""
        if self.first_at is None:
            self.first_at = now
        self.last_at = now
        self.num_tokens += num_tokens


class Calibration:
    """Bounds for the requests of one model in one ingress, and how good they were. Requests that wait for admission
    have bounds of their own, because that wait is known less well."""

    def __init__(self, stats: ModelStats):
        self._stats = stats
        self._bounds: dict[tuple[Latency, bool], LatencyBound] = {
            (latency, waits): LatencyBound() for latency in ("first_token", "per_token") for waits in (False, True)
        }

    def tell(
        self, now: float, first_token_s: float | None, per_token_s: float | None, *, waits: bool
    ) -> ForecastRequest:
        """Return a request that begins now, with its bounds. The arguments are expected seconds; None if unknown."""
        return ForecastRequest(
            asked_at=now,
            waits=waits,
            first_token=self._told("first_token", first_token_s, waits),
            per_token=self._told("per_token", per_token_s, waits),
        )

    def _told(self, latency: Latency, expected_s: float | None, waits: bool) -> ToldLatency | None:
        if expected_s is None:
            return None
        expected_s = max(expected_s, MIN_EXPECTED_S)
        return ToldLatency(expected_s, expected_s * self._bounds[latency, waits].ratio)

    def ended(self, request: ForecastRequest, now: float, *, one_sequence: bool) -> None:
        """Compare a request that has ended. one_sequence: whether all of its tokens are of one sequence.

        A request that ends without a token counts only if it is late already: the client may have left because of that.
        """
        first_at = request.first_at
        if first_at is not None:
            self._observe("first_token", request, request.first_token, first_at - request.asked_at)
        elif request.first_token is not None and now - request.asked_at > request.first_token.bound_s:
            self._observe("first_token", request, request.first_token, now - request.asked_at)
        if first_at is not None and one_sequence and request.num_tokens > 1:
            per_token_s = (request.last_at - first_at) / (request.num_tokens - 1)
            self._observe("per_token", request, request.per_token, per_token_s)

    def _observe(self, latency: Latency, request: ForecastRequest, told: ToldLatency | None, actual_s: float) -> None:
        if told is None:
            return
        waits = "yes" if request.waits else "no"
        bound = self._bounds[latency, request.waits]
        within = bound.observe(told.expected_s, actual_s, told.bound_s)
        outcome = "unknown" if told.bound_s == float("inf") else "within" if within else "beyond"
        self._stats.latency_bounds[latency][waits][outcome] += 1
        self._stats.latency_ratios[latency][waits].observe(actual_s / told.expected_s)
        self._stats.latency_margins[latency][waits] = bound.ratio

"""What becomes known of one sequence: its counts, its log line and its part of a trace."""

from __future__ import annotations

import logging
import time
from typing import Literal

from deployments.ingress_stats import ModelStats
from deployments.telemetry import HttpRequest
from deployments.tracing import SequenceTrace
from engine.messages import GenerateRequest, RequestTimes, TokenDelta

logger = logging.getLogger(__name__)

Reason = Literal["stop", "length", "abort", "error", "refused"]


class SequenceRecord:
    """From the time when the sequence is sent to an engine until it has ended for the client."""

    def __init__(self, request: GenerateRequest, http: HttpRequest, model: str, stats: ModelStats):
        self._request, self._http, self._model, self._stats = request, http, model, stats
        self._first_at: float | None = None  # monotonic
        self._times: RequestTimes | None = None
        self._output_tokens = 0
        self._cached_tokens = 0
        self._over = False
        logger.debug(
            "request sent request_id=%s model=%s prompt_tokens=%d", request.request_id, model, len(request.prompt)
        )

    def delta(self, delta: TokenDelta, tokens: int) -> None:
        """A delta has come; `tokens` of it count."""
        if self._first_at is None and delta.token_ids:
            self._first_at = time.monotonic()
            self._times, self._cached_tokens = delta.times, delta.num_cached_tokens
            self._stats.histograms["time_to_first_token_seconds"].observe(self._first_at - self._http.started_at)
        self._output_tokens += tokens

    def ended(self, reason: Reason, error: Exception | None = None) -> None:
        """reason: as the client sees it; `refused` without any work, which is no end. Only the first call counts."""
        if self._over:
            return
        self._over = True
        now = time.monotonic()
        seconds = now - self._http.started_at
        if reason != "refused":
            self._stats.finished[reason] += 1
        if reason in ("stop", "length"):
            self._stats.histograms["e2e_request_latency_seconds"].observe(seconds)
        trace = self._http.trace
        logger.info(
            "request ended request_id=%s model=%s reason=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d "
            "queue_s=%s prefill_s=%s first_token_s=%s seconds=%.3f trace_id=%s",
            self._request.request_id,
            self._model,
            reason,
            len(self._request.prompt),
            self._cached_tokens,
            self._output_tokens,
            None if self._times is None else round(self._times.scheduled_s, 3),
            None if self._times is None else round(self._times.first_token_s - self._times.scheduled_s, 3),
            None if self._first_at is None else round(self._first_at - self._http.started_at, 3),
            seconds,
            None if trace is None else trace.trace_id,
        )
        if error is not None:
            logger.warning("request failed request_id=%s error=%s", self._request.request_id, error)
        if trace is not None:
            trace.sequence(self._trace(now, reason))

    def _trace(self, now: float, reason: Reason) -> SequenceTrace:
        first = self._first_at
        return SequenceTrace(
            request_id=self._request.request_id,
            model=self._model,
            started_ns=self._http.started_ns,
            first_at_ns=0 if first is None else self._http.ns_since_1970(first),
            ended_at_ns=self._http.ns_since_1970(now),
            times=self._times,
            reason=reason,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
        )

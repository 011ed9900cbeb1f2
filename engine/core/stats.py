"""Statistics of one engine's requests and steps, under vLLM's names. Pure Python, no clock."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from engine.core.request import Request
from engine.wire.stats.histogram import SECONDS, TOKENS, Histogram
from engine.wire.token_delta import FinishReason

logger = logging.getLogger(__name__)

BOUNDS = {
    "inter_token_latency_seconds": SECONDS,
    "request_time_per_output_token_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_inference_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_num_preemptions": TOKENS,
    "iteration_tokens_total": TOKENS,
}


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Requests that ended, by reason.
    finished: Counter[str] = field(default_factory=Counter)

    def observe_scheduled(self, request: Request, cached: int, now: float) -> None:
        """Record that a request got its blocks, and that its first `cached` tokens are already computed."""
        logger.debug("request scheduled request_id=%s cached_tokens=%d", request.request_id, cached)
        if request.clock.scheduled_at is None:
            request.clock.scheduled_at = now
            self.prefix_queried_tokens += request.num_prompt
            self.prefix_hit_tokens += cached
            self.prompt_tokens += request.num_prompt
        if not request.num_preemptions:
            request.prefix.num_cached = cached
            return
        again = len(request.tokens) - cached
        self.recomputed_tokens += again
        logger.info("resumed request_id=%s cached_tokens=%d recomputed_tokens=%d",
                    request.request_id, cached, again)  # fmt: skip


class RequestMetrics:
    """Histograms of requests and steps, by the names in BOUNDS."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram.over(bounds) for name, bounds in BOUNDS.items()}

    def observe_step(self, tokens: int) -> None:
        """Record a planned step that computes `tokens` tokens."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def observe_tokens(self, requests: list[Request], now: float) -> None:
        """Record that a step produced one token or more for each of these requests."""
        for last, count in Counter([request.clock.last_token_at for request in requests]).items():
            if last is not None:
                self.histograms["inter_token_latency_seconds"].observe(now - last, count)
        for request in requests:
            request.clock.last_token_at = now

    def observe_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """Record the end of a request. Durations are recorded only for `stop` and `length`: those of an aborted request
        mean nothing."""
        times = request.times(now)
        if reason not in ("stop", "length") or times is None:
            return
        decode_s = times.finished_s - times.first_token_s
        values = {
            "request_queue_time_seconds": times.scheduled_s,
            "request_prefill_time_seconds": times.first_token_s - times.scheduled_s,
            "request_decode_time_seconds": decode_s,
            "request_inference_time_seconds": times.finished_s - times.scheduled_s,
            "request_prompt_tokens": request.num_prompt,
            "request_generation_tokens": request.num_output,
            "request_params_max_tokens": request.max_tokens,
            "request_num_preemptions": request.num_preemptions,
        }
        if request.num_output > 1:
            values["request_time_per_output_token_seconds"] = decode_s / (request.num_output - 1)
        for name, value in values.items():
            self.histograms[name].observe(value)

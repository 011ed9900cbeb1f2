"""What one engine measures of its requests and steps; the names are vLLM's. Pure Python, no clock."""

from __future__ import annotations

from engine.core.request import Request
from engine.wire.histogram import SECONDS, TOKENS, Histogram
from engine.wire.messages import FinishReason

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


class RequestMetrics:
    """histograms: by the keys of BOUNDS."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram.over(bounds) for name, bounds in BOUNDS.items()}

    def step(self, tokens: int) -> None:
        """A step that computes `tokens` tokens was planned."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def token(self, request: Request, now: float) -> None:
        """Call for every token, the first as well."""
        if request.last_token_at is not None:
            self.histograms["inter_token_latency_seconds"].observe(now - request.last_token_at)
        request.last_token_at = now

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        """Only requests that came to their own end are measured: how long an aborted one took says nothing."""
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

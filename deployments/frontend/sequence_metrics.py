"""Metrics of one sequence: its counts, log line, trace spans and timeline."""

from __future__ import annotations

import logging
import time

import msgspec

from deployments.billing.totals import UsageTotals, payer_of
from deployments.frontend.observers import Reason, SequenceObserver, SequenceView
from deployments.frontend.sequence_context import SequenceContext
from deployments.observability.telemetry import HttpRequest
from deployments.observability.timeline import MAX_EVENTS, MAX_TEXT_TOKENS, SequenceTimeline
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.handoffs import HandoffTimes
from engine.wire.timeline import TimelineEvent
from engine.wire.token_delta import RequestTimes, TokenDelta

logger = logging.getLogger(__name__)


class SequenceMetrics(SequenceObserver):
    """Measures a sequence from the time its prompt is ready until it has ended for the client."""

    def __init__(
        self, sequence: SequenceView, http: HttpRequest, context: SequenceContext, *, quiet: bool, counts_prompt: bool
    ):
        """quiet: whether another sequence represents this one in logs, traces and timelines, unless an error occurs.
        counts_prompt: whether the API key has used the prompt's tokens; other sequences of the same prompt have not
        used them again."""
        request = sequence.retry.request
        lora = request.record(ModelAdapter)
        self._sequence, self._http, self._context = sequence, http, context
        self._stats, self._timelines = context.stats, context.timelines
        self._quiet, self._counts_prompt = quiet, counts_prompt
        self._payer = payer_of(request.client)
        self._answered = False  # whether the current attempt has produced a token
        self._timeline = SequenceTimeline(
            request_id=request.request_id,
            model=context.model,
            key=self._payer,
            adapter=None if lora is None else lora.name,
            prompt_tokens=len(request.prompt),
            arrived_at=http.started_ns / 1e9,
        )
        self._waits_at = http.started_at
        self._times: RequestTimes | None = None
        self._handoffs: list[HandoffTimes] = []
        self._traced = True
        self._moved_at: float | None = None  # since when a sequence that moves has no engine
        logger.debug(
            "request sent request_id=%s model=%s prompt_tokens=%d",
            request.request_id,
            context.model,
            len(request.prompt),
        )

    def waits(self) -> None:
        self._waits_at = time.monotonic()
        self._note("the request came", self._http.started_at)
        self._note(f"its prompt of {self._timeline.prompt_tokens} tokens waits for admission", self._waits_at)
        self._timelines.begin(self._timeline)

    def admitted(self) -> None:
        now = time.monotonic()
        self._timeline.admission_s = now - self._waits_at
        self._note("admitted", now)

    def sent(self, request_id: str) -> None:
        self._note(f"sent to the engines as {request_id}")

    def replayed(self, reason: str, error: BaseException) -> None:
        self._answered = False
        self._moved_at = time.monotonic() if reason == "moved" else None
        self._timeline.replays += 1
        self._note(
            f"the attempt failed after {self._timeline.output_tokens} tokens, another follows: {reason} ({error})"
        )

    def computes_otherwise(self, tokens: int) -> None:
        """The sequence goes on in an engine with other numerics. tokens: output before."""
        self._note(f"after {tokens} tokens it goes on with other numerics: the text from there on may be another one")

    def happened(self, timeline: list[TimelineEvent]) -> None:
        """Add events that happened in engines: those that name none, in the engine of the current attempt."""
        engine_id, capacity = self._sequence.engine, MAX_EVENTS - len(self._timeline.events)
        for event in timeline[: max(0, capacity)]:
            self._timeline.events.append(event if event.where else msgspec.structs.replace(event, where=engine_id))

    def arrived(self, delta: TokenDelta) -> None:
        for cost in delta.records(SequenceCost):
            self._timeline.costs[delta.request_id] = cost

    def delta(self, delta: TokenDelta, num_tokens: int) -> None:
        timeline = self._timeline
        if not self._answered:
            self._answered, timeline.state = True, "running"
            timeline.engines.append(self._sequence.engine)
            self._note(f"first token from {timeline.engines[-1]}")
        if timeline.first_token_s is None and (delta.token_ids or delta.answer):
            self._times, timeline.cached_tokens = delta.times, delta.num_cached_tokens
            self._handoffs = delta.records(HandoffTimes)
            timeline.first_token_s = time.monotonic() - self._http.started_at
            if delta.times is not None:
                timeline.queue_s = delta.times.scheduled_s
                timeline.prefill_s = delta.times.first_token_s - delta.times.scheduled_s
            if delta.token_ids:
                self._stats.histograms["time_to_first_token_seconds"].observe(timeline.first_token_s)
        if self._moved_at is not None and delta.token_ids:
            self._stats.move_pauses.observe(time.monotonic() - self._moved_at)
            self._moved_at = None
        timeline.output_tokens += num_tokens
        timeline.preemptions += delta.num_preemptions

    def ended(self, reason: Reason, error: Exception | None) -> None:
        """`refused` does not count as an end. Failures caused by a model that is still starting are logged at level
        `debug` only."""
        now, timeline = time.monotonic(), self._timeline
        timeline.state, timeline.reason = "ended", reason
        if error is not None:
            timeline.error, timeline.error_type = str(error), getattr(error, "code", type(error).__name__)
        timeline.seconds = now - self._http.started_at
        if self._timelines.keeps_texts:
            timeline.prompt = self._text(self._sequence.retry.request.prompt)
            timeline.output = self._text(self._sequence.retry.output)
        self._note(f"ended: {reason}, {timeline.output_tokens} output tokens", now)
        quiet = self._quiet and reason == "stop" and not timeline.replays
        self._timelines.end(timeline, keep=not quiet)
        if reason != "refused":
            self._stats.finished[reason] += 1
            if timeline.adapter is not None:
                self._stats.count_adapter(timeline.adapter)
        if reason in ("stop", "length"):
            self._stats.histograms["e2e_request_latency_seconds"].observe(timeline.seconds)
            self._stats.operation(self._http.operation).observe(timeline)
        trace = self._http.trace
        starting = timeline.first_token_s is None and not self._context.admission.availability.was_up
        logger.log(
            logging.DEBUG if starting or quiet else logging.INFO,
            "request ended request_id=%s model=%s adapter=%s reason=%s prompt_tokens=%d cached_tokens=%d "
            "output_tokens=%d queue_s=%s prefill_s=%s first_token_s=%s seconds=%.3f trace_id=%s",
            timeline.request_id,
            timeline.model,
            timeline.adapter,
            reason,
            timeline.prompt_tokens,
            timeline.cached_tokens,
            timeline.output_tokens,
            _rounded(timeline.queue_s),
            _rounded(timeline.prefill_s),
            _rounded(timeline.first_token_s),
            timeline.seconds,
            None if trace is None else trace.trace_id,
        )
        if error is not None:
            level = logging.DEBUG if starting else logging.WARNING
            logger.log(level, "request failed request_id=%s error=%s", timeline.request_id, error)
        self._traced = not quiet

    def billed(self, *, computed_again: bool) -> None:
        """Count what the sequence has used, and trace it. Called once, after `ended`, when its cost is known.
        computed_again: as in LiveGeneration."""
        timeline = self._timeline
        cost = SequenceCost.total(timeline.costs.values())
        if computed_again:
            used = UsageTotals(wasted_s=cost.compute_s + cost.wasted_s)
        else:
            timeline.price = self._context.prices.of(cost)
            used = UsageTotals(
                1,
                timeline.prompt_tokens if self._counts_prompt else 0,
                timeline.cached_tokens if self._counts_prompt else 0,
                timeline.output_tokens,
                cost.compute_s,
                cost.wasted_s,
                cost.kv_gib_s,
                timeline.price,
                cost.tier_gib_s,
            )
        if self._http.trace is not None and self._traced:
            self._http.trace.sequence(timeline, self._times, self._handoffs)
        if timeline.admission_s is not None and timeline.reason != "refused":
            self._stats.count_usage(self._payer, used)
            self._context.hourly.add(self._payer, timeline.model, timeline.adapter, used)

    def _text(self, token_ids: list[int]) -> str:
        """Return a text with its special tokens, cut to the length that a timeline keeps."""
        parts = map(self._context.tokenizer.token_bytes, token_ids[:MAX_TEXT_TOKENS])
        return b"".join(parts).decode(errors="replace")

    def _note(self, what: str, at: float | None = None) -> None:
        """Add an event to the timeline. at: time on the monotonic clock; None for now."""
        since_1970 = self._http.ns_since_1970(time.monotonic() if at is None else at) / 1e9
        self._timeline.events.append(TimelineEvent(since_1970, self._timelines.ingress_id, what))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

"""One sequence of an HTTP request."""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from deployments.billing.prices import FREE, Prices
from deployments.frontend.costs.late_deltas import LateDeltas
from deployments.frontend.inboxes import Inbox
from deployments.frontend.observers import Observe, Observers, Reason, SequenceView
from deployments.frontend.retry import RetryState, TokensLost
from deployments.frontend.sequence_context import SequenceContext
from deployments.frontend.sequence_metrics import SequenceMetrics
from deployments.observability.telemetry import HttpRequest
from engine.errors import EngineError, OtherModel, ServingError
from engine.text.text_stream import TextChunk, TextStream
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.speculation import Verified
from engine.wire.remote_request import KVSource
from engine.wire.token_delta import ErrorInfo, TokenDelta

logger = logging.getLogger(__name__)

FINAL_DELTA_S = 2.0
"""Seconds after a call's end in which the final delta may still arrive, since tokens do not pass through the call."""

LEFT: set[asyncio.Task[None]] = set()
"""Calls of requests that have moved on, until they end."""


@dataclass(frozen=True, slots=True)
class PromptHolds:
    """Outcomes of the holds of one prompt."""

    cached: int
    """Tokens of the prompt that were cached already."""
    outcomes: list[HoldOutcome]

    def written(self, above_s: float, up_to_s: float) -> int:
        """Return how many tokens were not cached and are now held for a time in this range. A token in several holds
        counts for the hold with the fewest tokens."""
        tokens, start = 0, self.cached
        for outcome in sorted(self.outcomes, key=lambda outcome: outcome.tokens):
            if outcome.refusal is None and outcome.tokens > start:
                tokens += outcome.tokens - start if above_s < outcome.ttl_s <= up_to_s else 0
                start = outcome.tokens
        return tokens


@dataclass(slots=True)
class RequestUsage:
    """Token counts over all sequences of an HTTP request. A prompt shared by several sequences counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    has_prediction: bool = False
    """Whether the request has a predicted output."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    holds: dict[int, PromptHolds] = field(default_factory=dict)
    """Outcomes of the holds that the request asks for, by the index of the sequence."""

    numerics_borders: list[tuple[int, int]] = field(default_factory=list)
    """Where sequences have gone on in engines that compute with other numerics: the index of the sequence, and its
    tokens before."""

    costs: dict[str, SequenceCost] = field(default_factory=dict)
    """What each attempt has cost, as far as its engine has reported it, by request id."""
    prices: Prices = FREE

    @property
    def cost(self) -> SequenceCost:
        """What all attempts have cost."""
        return SequenceCost.total(self.costs.values())

    def count_holds(self, index: int, delta: TokenDelta) -> None:
        """Record the outcomes of holds, which a sequence's first delta from each engine reports."""
        if outcomes := delta.records(HoldOutcome):
            before = self.holds.get(index)
            self.holds[index] = PromptHolds(delta.num_cached_tokens if before is None else before.cached, outcomes)

    @property
    def hold_outcomes(self) -> list[HoldOutcome]:
        return [outcome for holds in self.holds.values() for outcome in holds.outcomes]

    def held_tokens(self, above_s: float = 0.0, up_to_s: float = math.inf) -> int:
        """Return how many prompt tokens were computed and are now held for a time in this range."""
        return sum(holds.written(above_s, up_to_s) for holds in self.holds.values())

    def count_prediction(self, delta: TokenDelta, num_tokens: int) -> None:
        """Count a delta's accepted and rejected predicted tokens. num_tokens: tokens of the delta up to a stop
        string."""
        verified = Verified.total(delta.records(Verified))
        shown = min(verified.accepted, num_tokens)
        self.accepted_prediction_tokens += shown
        self.rejected_prediction_tokens += verified.accepted - shown + verified.rejected


class ReportedError(ServingError):
    """An error that the engine reported in a request's final delta."""

    def __init__(self, info: ErrorInfo, source: KVSource | None = None):
        """source: engine that holds the KV, if the request moves."""
        super().__init__(info, source)
        self.info, self.source = info, source

    def __str__(self) -> str:
        return self.info.message

    @property
    def code(self) -> str:
        return self.info.code


class Aborted(EngineError):
    """Raised when the request's call was cancelled. Serve cancels it when the client has left, sometimes before the
    ingress notices."""

    def __init__(self, request_id: str):
        super().__init__(request_id, "it was aborted")


AttemptError = (ReportedError, Aborted, TokensLost)
"""The errors that `Sequence.add` raises if the attempt has failed."""


class Attempt:
    """One attempt to run a sequence in an engine. Its end is reported twice: by the final delta on the token channel,
    and by the return of the call. Whichever comes first decides:

    - The final delta comes first: the sequence is finished, and the outcome of the call is ignored.
    - The call fails first: the attempt has failed, and no more deltas are awaited.
    - The call returns first: the final delta has FINAL_DELTA_S to arrive; then it counts as lost.
    """

    def __init__(self, request_id: str, call: Coroutine[Any, Any, None], wake: Callable[[], None]):
        """Start the call. wake: function called when `error` is set."""
        self.request_id = request_id
        self.error: BaseException | None = None
        """Reason why the final delta will not arrive; None while it can still arrive."""
        self._wake = wake
        self._closed = False
        self._call = asyncio.create_task(call)
        self._call.add_done_callback(self._on_call_ended)

    def close(self) -> bool:
        """Cancel the call, which aborts the request in its engine. Returns False if the call had already ended."""
        self._closed = True
        return self._call.cancel()

    def leave(self) -> None:
        """Let the call end by itself: the request has left, and its engine still holds the KV."""
        self._closed = True
        LEFT.add(self._call)
        self._call.add_done_callback(LEFT.discard)

    def _on_call_ended(self, call: asyncio.Task[None]) -> None:
        if call.cancelled():
            return
        error = call.exception()
        delay_s = FINAL_DELTA_S if error is None else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._give_up, error or TokensLost(self.request_id))

    def _give_up(self, error: BaseException) -> None:
        if not self._closed:
            self.error = error
            self._wake()


class Sequence:
    """Turns the deltas of its attempts into text, and starts another attempt when an engine is lost (retry.py)."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        http: HttpRequest,
        context: SequenceContext,
        usage: RequestUsage,
        late: LateDeltas,
        observers: Iterable[Observe] = (),
        *,
        first: bool,
    ):
        """index: index of the sequence in the HTTP request. observers: further ones, besides those of the context.
        first: whether this is the first sequence for its prompt. Cached prompt tokens are counted for the first
        sequence only."""
        self.index = index
        self.finished = False
        self.retry = RetryState(request, context.max_replays, asyncio.get_running_loop().time())
        quiet = index > 0 and request.record(PoolingParams) is not None
        view: SequenceView = weakref.proxy(self)  # a cycle would leave the memory of images to the garbage collector
        self.metrics = SequenceMetrics(view, http, context, quiet=quiet, counts_prompt=first)
        self._text = TextStream(request.params, context.tokenizer, index)
        self._channel, self._pool, self._stats = context.channel, context.pool, context.stats
        self._usage, self._late, self._counts_cached = usage, late, first
        self._attempt: Attempt | None = None
        self._inbox = Inbox()
        found = (observe(view) for observe in (*context.observers, *observers))
        self._observers = Observers([*filter(None, found), self.metrics])
        self._has_ended = False
        self._begins = True  # whether the current attempt has brought no token yet
        self._numerics: str | None = None  # of the attempt before

    def start(self, inbox: Inbox) -> None:
        """Send the current attempt to an engine. inbox: inbox to wake if the attempt fails without a final delta."""
        request_id, self._inbox, self._begins = self.retry.request_id, inbox, True
        self._attempt = Attempt(request_id, self._generate(), inbox.wake)
        for sent in self._observers.sent:
            sent(request_id)

    def waits(self) -> None:
        """Begin to wait for admission. `end` must follow. Raises an error for a request that may not run."""
        for waits in self._observers.waits:
            waits()

    def admitted(self) -> None:
        for admitted in self._observers.admitted:
            admitted()

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        """Note that the sequence has ended for the client. Only the first call has an effect."""
        if not self._has_ended:
            self._has_ended = True
            for ended in self._observers.ended:
                ended(reason, error)

    @property
    def engine(self) -> str:
        """See SequenceView."""
        return self._channel.engine_of(self.retry.request_id)

    def add(self, delta: TokenDelta) -> TextChunk | None:
        """Take a delta of the current attempt. Returns None if the delta has neither tokens nor an end.

        Raises one of AttemptError if the attempt has failed.
        """
        if delta.timeline:
            self.metrics.happened(delta.timeline)
            if not delta.token_ids and delta.finish_reason is None:
                return None
        self._arrived(delta)
        if delta.finish_reason in ("error", "abort"):
            sources = delta.records(KVSource)
            raise Aborted(delta.request_id) if delta.error is None else ReportedError(delta.error, *sources)
        if self._begins and delta.token_ids:
            self._begin(len(self.retry.output))
        delta = self.retry.add(delta)
        runs = delta.finish_reason is None
        for received in self._observers.received:
            delta = received(delta)
        chunk = self._text.add(delta)
        num_tokens = len(chunk.token_ids)
        for heard in self._observers.delta:
            heard(delta, num_tokens)
        self._usage.completion_tokens += num_tokens
        if delta.parts:
            self._usage.count_prediction(delta, num_tokens)
            self._usage.count_holds(self.index, delta)
        if self._counts_cached:
            self._usage.cached_tokens += delta.num_cached_tokens
        if chunk.finish_reason is not None:
            self.finished = True
            if runs:
                self._expect_last(delta.request_id)
                self._channel.abort(delta.request_id, "stop")  # a stop string or an observer, of which it knows nothing
            self.end(chunk.finish_reason)
        return chunk

    def _begin(self, tokens: int) -> None:
        """Note the first token of an attempt. tokens: output before it."""
        self._begins = False
        numerics = self._channel.numerics_of(self.retry.request_id)
        if tokens and self._numerics not in (None, numerics):
            self._usage.numerics_borders.append((self.index, tokens))
            self.metrics.computes_otherwise(tokens)
            logger.info("request goes on with other numerics request_id=%s tokens=%d numerics=%s before=%s",
                        self.retry.request.request_id, tokens, numerics, self._numerics)  # fmt: skip
        self._numerics = self.retry.numerics = numerics

    @property
    def lost(self) -> BaseException | None:
        """Reason why the current attempt will not get its final delta; None while it can still arrive."""
        return None if self._attempt is None else self._attempt.error

    def go_on(self, error: BaseException, inbox: Inbox) -> None:
        """Abort the current attempt, which has failed, and start another. Raises an error if another attempt
        cannot succeed."""
        failed = self.retry.request_id
        for seen in self._observers.failed:
            error = seen(error)
        source, engine = None, ""
        if isinstance(error, ReportedError) and error.code == "moved":
            source, engine = error.source, self._channel.engine_of(failed)
        reason = self.retry.replay(error, source, engine)
        if reason is None:
            self.finished = True
            raise self.retry.failure(error, asyncio.get_running_loop().time())
        self._stats.replays[reason] += 1
        for replayed in self._observers.replayed:
            replayed(reason, error)
        level, what = (logging.WARNING, "replayed") if source is None else (logging.INFO, "moved")
        logger.log(
            level,
            f"request {what} request_id=%s replay=%d received_tokens=%d reason=%s error=%s",
            self.retry.request.request_id,
            self.retry.num_retries,
            len(self.retry.output),
            reason,
            error,
        )
        if source is None or self._attempt is None:
            self.abort()
        else:
            self._attempt.leave()
        self._channel.move(failed, self.retry.request_id)
        self.start(inbox)

    def abort(self) -> None:
        """End the current attempt in its engine: by cancelling its call, or, if the call has ended, through the token
        channel, because the engine may outlive its replica."""
        if self._attempt is None:
            return
        request_id = self._attempt.request_id
        cancelled = self._attempt.close()
        if cancelled or self._channel.knows(request_id):
            self._expect_last(request_id)
        if not cancelled:
            self._channel.abort(request_id)

    def _expect_last(self, request_id: str) -> None:
        """Take the last delta of an attempt that is being aborted, even if it comes only after the end of the
        request."""
        if (known := self._inbox.last.get(request_id)) is not None:
            self._arrived(known)
            return

        def take(last: TokenDelta | None) -> None:
            if last is not None:
                self._arrived(last)
            self._late.came()

        self._late.expect()
        self._channel.take_last(request_id, take)

    def _arrived(self, delta: TokenDelta) -> None:
        for arrived in self._observers.arrived:
            arrived(delta)

    async def _generate(self) -> None:
        """Run the current attempt, and return when it has ended in its engine. The pool waits for a replica if there is
        none."""
        retry = self.retry
        if retry.num_retries:
            await asyncio.sleep(retry.back_off_s(asyncio.get_running_loop().time()))
            if retry.left_s(asyncio.get_running_loop().time()) == 0.0:
                raise retry.timeout()
        for attempting in self._observers.attempting:
            await attempting()
        while True:
            request = retry.attempt(asyncio.get_running_loop().time())
            for sending in self._observers.sending:
                request = sending(request)
            try:
                return await self._pool.generate(request, avoid=retry.avoid)
            except OtherModel as error:
                if not retry.adopt(ModelIdentity(error.weights, error.vocabulary)):
                    raise

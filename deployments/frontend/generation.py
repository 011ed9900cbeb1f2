"""All sequences of one HTTP request: from engine requests to text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.frontend.admission import Admission
from deployments.frontend.backlog import take_backlog
from deployments.frontend.retry import RetryState, TokensLost
from deployments.frontend.sequence_metrics import Reason, SequenceMetrics
from deployments.frontend.token_channel import Inbox, TokenChannel
from deployments.observability.stats import ModelStats
from deployments.observability.telemetry import current_request
from deployments.observability.timeline import RequestTimelines
from deployments.replicas.pools import EnginePool
from engine.errors import EngineError, OtherModel, Overloaded, ServingError
from engine.text.detokenizer import TokenBytes
from engine.text.text_stream import TextChunk, TextStream
from engine.wire.messages import ErrorInfo, GenerateRequest, TokenDelta
from engine.wire.model_identity import ModelIdentity

logger = logging.getLogger(__name__)

FINAL_DELTA_S = 2.0  # tokens come beside the call that reports the end, so they may be a little later than it
TIMEOUT_GRACE_S = 10.0  # engine and replica end a late request themselves; this is for when both are lost


@dataclass(slots=True, frozen=True)
class SequenceChunk:
    """A chunk of one of the sequences. index: of the sequence among those of the HTTP request."""

    index: int
    chunk: TextChunk


@dataclass(slots=True)
class Usage:
    """Tokens of all sequences together; a prompt that several sequences share counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class ReportedError(ServingError):
    """An error that the engine reported in a request's final delta."""

    def __init__(self, info: ErrorInfo):
        super().__init__(info)
        self.info = info

    def __str__(self) -> str:
        return self.info.message

    @property
    def code(self) -> str:
        return self.info.code


class Aborted(EngineError):
    """The call of this request was cancelled: by Serve, when the client is gone, sometimes before it tells us so."""

    def __init__(self, request_id: str):
        super().__init__(request_id, "it was aborted")


@dataclass(slots=True)
class _Sequence:
    """call: of the present attempt, once it is sent. overdue: it has ended, and the final delta should have come."""

    index: int
    retry: RetryState
    text: TextStream
    metrics: SequenceMetrics
    call: asyncio.Task[None] | None = None
    overdue: bool = False
    finished: bool = False


class Generation:
    """Runs the sequences of one HTTP request, once. One whose engine is lost goes on in another (replay.py)."""

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        *,
        samples_per_prompt: int,
        tokenizer: TokenBytes,
        channel: TokenChannel,
        pool: EnginePool,
        model: str,
        stats: ModelStats,
        timelines: RequestTimelines,
        admission: Admission,
        client: str,
        max_replays: int,
    ):
        """client: whose turn it takes in `admission`. max_replays: of each sequence."""
        self.usage = Usage(prompt_tokens=sum(len(r.prompt) for r in requests[::samples_per_prompt]))
        http, now = current_request(), time.monotonic()
        self._sequences = {  # by the request id of the present attempt
            r.request_id: _Sequence(
                i,
                RetryState(r, max_replays, now),
                TextStream(r.params, tokenizer),
                SequenceMetrics(r, http, model, stats, timelines),
            )
            for i, r in enumerate(requests)
        }
        self._stats = stats
        for _ in requests[::samples_per_prompt]:
            stats.histograms["request_params_n"].observe(samples_per_prompt)
        self._samples_per_prompt = samples_per_prompt
        self._channel = channel
        self._pool = pool
        self._admission, self._client = admission, client
        self._timed_out = False

    async def chunks(self) -> AsyncGenerator[SequenceChunk]:
        """Closing the generator early aborts in the engines what still runs.

        Raises the first error of any sequence, and drops the others. Time spent waiting for admission counts.
        """
        first, size = next(iter(self._sequences)), len(self._sequences)
        left: Reason = "abort"  # how those ended that have not come to their own end
        failure: Exception | None = None
        all_metrics = [sequence.metrics for sequence in self._sequences.values()]
        try:
            for metrics in all_metrics:
                metrics.waits()
            left_s = self._left_s()
            async with (
                self._admission.enter(first, self._client, size, self.usage.prompt_tokens, left_s) as queued,
                aclosing(self._run()) as chunks,
            ):
                for metrics in all_metrics:
                    metrics.admitted()
                async for chunk in chunks:
                    self._admission.charge(queued, len(chunk.chunk.token_ids))
                    yield chunk
        except Aborted:
            raise  # counts as `abort`
        except Exception as error:
            left, failure = "refused" if isinstance(error, Overloaded) else "error", error
            raise
        finally:
            for metrics in all_metrics:
                metrics.ended(left, failure)

    async def _run(self) -> AsyncGenerator[SequenceChunk]:
        inbox = self._channel.open(self._sequences)
        alarm = self._set_alarm(inbox)
        try:
            for sequence in self._sequences.values():
                self._call(sequence, self._generate(sequence.retry), inbox)
            while not all(s.finished for s in self._sequences.values()):
                for delta in take_backlog(await inbox.get(), inbox):
                    if delta is None:
                        self._look(inbox)
                        continue
                    live = self._sequences.get(delta.request_id)
                    if live is None or live.finished:
                        continue  # of an attempt that was given up
                    if delta.timeline:
                        live.metrics.happened(delta.timeline, self._channel.engine_of(delta.request_id))
                        if not delta.token_ids and delta.finish_reason is None:
                            continue
                    if delta.finish_reason in ("error", "abort"):
                        error = Aborted(delta.request_id) if delta.error is None else ReportedError(delta.error)
                        self._go_on(live, error, inbox)
                        continue
                    try:
                        chunk = self._take(live, delta)
                    except TokensLost as error:
                        self._go_on(live, error, inbox)
                    else:
                        yield chunk
        finally:
            if alarm is not None:
                alarm.cancel()
            self._channel.close(self._sequences)
            for sequence in self._sequences.values():
                if not sequence.finished and sequence.call is not None:
                    sequence.call.cancel()

    def _take(self, sequence: _Sequence, delta: TokenDelta) -> SequenceChunk:
        delta = sequence.retry.add(delta)
        chunk = sequence.text.add(delta)
        if chunk.finish_reason is not None:
            sequence.finished = True
            if delta.finish_reason is None:
                self._channel.stop(delta.request_id)  # a stop string, of which the engine does not know
        if not sequence.metrics.answered:
            sequence.metrics.answered_by(self._channel.engine_of(delta.request_id))
        sequence.metrics.delta(delta, len(chunk.token_ids))
        if chunk.finish_reason is not None:
            sequence.metrics.ended(chunk.finish_reason)
        self.usage.completion_tokens += len(chunk.token_ids)
        if sequence.index % self._samples_per_prompt == 0:
            self.usage.cached_tokens += delta.num_cached_tokens
        return SequenceChunk(sequence.index, chunk)

    def _look(self, inbox: Inbox) -> None:
        """Woken without a delta: some call ended without its final delta, or the time is over."""
        for sequence in [s for s in self._sequences.values() if not s.finished]:
            if self._timed_out:
                raise sequence.retry.timeout()
            if sequence.overdue and sequence.call is not None:
                error = sequence.call.exception() or TokensLost(sequence.retry.request_id)
                self._go_on(sequence, error, inbox)

    def _go_on(self, sequence: _Sequence, error: BaseException, inbox: Inbox) -> None:
        """An attempt has failed: begin another. Raises the error if that is of no use."""
        retry, failed = sequence.retry, sequence.retry.request_id
        reason = retry.replay(error)
        if reason is None:
            sequence.finished = True
            raise retry.failure(error)
        self._stats.replays[reason] += 1
        sequence.metrics.replayed(reason, error)
        logger.warning(
            "request replayed request_id=%s replay=%d received_tokens=%d reason=%s error=%s",
            retry.request.request_id,
            retry.num_replays,
            len(retry.output),
            reason,
            error,
        )
        self._sequences[retry.request_id] = self._sequences.pop(failed)
        self._channel.move(failed, retry.request_id)
        if sequence.call is not None:
            sequence.call.cancel()
        self._call(sequence, self._replay(retry), inbox)

    async def _generate(self, retry: RetryState) -> None:
        """Returns when the present attempt has ended in its engine. The pool waits for a replica if there is none."""
        while True:
            try:
                return await self._pool.generate(retry.attempt(time.monotonic()))
            except OtherModel as error:
                if not retry.adopt(ModelIdentity(error.weights, error.vocabulary)):
                    raise

    async def _replay(self, retry: RetryState) -> None:
        await asyncio.sleep(retry.back_off_s(time.monotonic()))
        if retry.left_s(time.monotonic()) == 0.0:
            raise retry.timeout()
        await self._generate(retry)

    def _call(self, sequence: _Sequence, generate: Coroutine[Any, Any, None], inbox: Inbox) -> None:
        sequence.call, sequence.overdue = asyncio.create_task(generate), False
        sequence.metrics.sent(sequence.retry.request_id)
        sequence.call.add_done_callback(partial(_wake, sequence, inbox))

    def _left_s(self) -> float | None:
        """Of the sequence that may take longest; None without a limit."""
        times = [s.retry.left_s(time.monotonic()) for s in self._sequences.values()]
        return max((left_s for left_s in times if left_s is not None), default=None)

    def _set_alarm(self, inbox: Inbox) -> asyncio.TimerHandle | None:
        left_s = self._left_s()
        if left_s is None:
            return None

        def ring() -> None:
            self._timed_out = True
            inbox.put_nowait(None)

        return asyncio.get_running_loop().call_later(left_s + TIMEOUT_GRACE_S, ring)


def _wake(sequence: _Sequence, inbox: Inbox, call: asyncio.Task[None]) -> None:
    """A call has ended: look at it, at once if it failed, or when its final delta has had time to come."""
    if call.cancelled():
        return

    def look() -> None:
        if sequence.call is call:
            sequence.overdue = True
            inbox.put_nowait(None)

    delay_s = 0.0 if call.exception() is not None else FINAL_DELTA_S
    asyncio.get_running_loop().call_later(delay_s, look)

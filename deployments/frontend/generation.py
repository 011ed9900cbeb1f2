"""All sequences of one HTTP request: from engine requests to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import msgspec

from deployments.billing.bill import Bill, Used
from deployments.frontend.costs.late_deltas import LateDeltas
from deployments.frontend.costs.sequence_costs import SequenceCosts
from deployments.frontend.first_token import current_deadline
from deployments.frontend.inboxes import Inbox
from deployments.frontend.observers import GenerationObserver, Observe, Reason, RequestSize
from deployments.frontend.sequence import Aborted, AttemptError, RequestUsage, Sequence
from deployments.frontend.sequence_context import SequenceContext
from deployments.observability.telemetry import current_request
from engine.errors import Overloaded
from engine.fairness.fair_queue import QueuedRequest
from engine.hooks import overriding
from engine.text.text_stream import TextChunk
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.speculation import Prediction
from engine.wire.token_delta import TokenDelta

TIMEOUT_GRACE_S = 10.0
"""Seconds after a request's deadline in which its engine or replica may end the request. After them the ingress ends
it, because both are lost."""

STARTED_AT_ONCE = 32


class LiveGeneration:
    """Runs the sequences of one HTTP request in the engines. An object can be used only once."""

    def __init__(
        self,
        context: SequenceContext,
        prompts: list[list[GenerateRequest]],
        client: str,
        observers: tuple[Observe, ...] = (),
        *,
        resumes: bool = False,
    ):
        """prompts: for each prompt, the requests of its sequences. client: client to whom admission charges them.
        observers: further ones of each sequence. resumes: as in RequestSize."""
        self.prompts = [requests[0].prompt for requests in prompts]
        self.usage = RequestUsage(
            prompt_tokens=sum(len(requests[0].prompt) for requests in prompts),
            has_prediction=prompts[0][0].record(Prediction) is not None,
            prices=context.prices,
        )
        self._late = LateDeltas()
        self._bill = Bill(self._used, self._late.when_none)
        http, self._sequences = current_request(), dict[str, Sequence]()  # by request id of the present attempt
        http.bills.append(self._bill)
        heard_by: tuple[Observe, ...] = (partial(SequenceCosts, self.usage.costs), *observers)
        pools = prompts[0][0].record(PoolingParams) is not None
        self._deadline = None if pools else current_deadline()
        ttft_slo_s = None if self._deadline is None else self._deadline.wanted_s()
        for requests in prompts:
            context.stats.histograms["request_params_n"].observe(len(requests))
            for request in requests:
                index, first = len(self._sequences), request is requests[0]
                request = msgspec.structs.replace(request, ttft_slo_s=ttft_slo_s)
                sequence = Sequence(index, request, http, context, self.usage, self._late, heard_by, first=first)
                self._sequences[request.request_id] = sequence
        self._admission, self._channel, self._client = context.admission, context.channel, client
        self._num_unfinished = len(self._sequences)
        request = prompts[0][0]
        size = RequestSize(
            self.usage.prompt_tokens,
            len(self._sequences),
            0 if pools else request.params.max_tokens,
            context.max_model_len,
            resumes,
        )
        found = (observe(size, self._bill) for observe in context.generation_observers)
        self._observers = [observer for observer in found if observer is not None]
        self._taking = overriding(self._observers, GenerationObserver.taking)
        self.computed_again = False
        """Whether another ingress will compute all of it again: then nobody pays for what was computed here. Set before
        the generator is closed."""
        self.charged_again = False
        """Whether that ingress will also charge for the request and its prompt."""
        self._timed_out = False
        self._lost: list[Sequence] = []  # whose attempts were lost when the present deltas were taken
        self.admitted = asyncio.Event()  #: set once the request is admitted

    async def chunks(self) -> AsyncGenerator[TextChunk]:
        """Generate. Closing the generator early aborts the sequences that are still running.

        Raises the first error of any sequence, and drops the others. The deadline includes the wait for admission.
        """
        first, size = next(iter(self._sequences)), len(self._sequences)
        left: Reason = "abort"  # reason recorded for sequences that did not finish
        failure: Exception | None = None
        sequences = list(self._sequences.values())
        try:
            for sequence in sequences:
                sequence.waits()
            async with AsyncExitStack() as stack:
                for observer in self._observers:
                    await stack.enter_async_context(observer.running())
                entering = self._admission.enter(
                    first, self._client, size, self.usage.prompt_tokens, self._left_s(), self._deadline
                )
                queued = await stack.enter_async_context(entering)
                self.admitted.set()
                for sequence in sequences:
                    sequence.admitted()
                try:
                    with self._inbox() as inbox:
                        await self._start(inbox)
                        while self._num_unfinished:
                            deltas = await inbox.take()
                            if deltas[-1] is None:  # a slow client takes these when the rest may have come later
                                self._lost = [s for s in self._sequences.values() if s.lost is not None]
                            for delta in deltas:
                                for taking in self._taking:
                                    await taking(0 if delta is None else len(delta.token_ids))
                                if (chunk := self._take(delta, inbox)) is not None:
                                    self._admission.charge(queued, len(chunk.token_ids))
                                    yield chunk
                finally:
                    self._late.when_none(partial(self._settle, queued))
        except Aborted:
            raise  # counts as `abort`
        except Exception as error:
            left, failure = "refused" if isinstance(error, Overloaded) else "error", error
            raise
        finally:
            for sequence in sequences:
                sequence.end(left, failure)
            self._late.when_none(self._count)

    def _count(self) -> None:
        self._bill.close(complete=len(self.usage.costs) >= len(self._sequences))
        for sequence in self._sequences.values():
            sequence.metrics.billed(computed_again=self.computed_again)

    def _settle(self, queued: QueuedRequest) -> None:
        """Charge the client of the queue with what the request has really cost."""
        if len(self.usage.costs) >= len(self._sequences):
            self._admission.settle(queued, self.usage.cost.compute_s)

    def _used(self) -> Used:
        """Return what the request has used so far."""
        usage, cost, started = self.usage, self.usage.cost, self.admitted.is_set()
        if self.computed_again:
            return Used(started and not self.charged_again, usage.prompt_tokens, 0, 0.0, 0.0)
        money, cached = usage.prices.of(cost), usage.cached_tokens
        return Used(started, usage.prompt_tokens, usage.completion_tokens, cost.compute_s, money, cached)

    @contextmanager
    def _inbox(self) -> Iterator[Inbox]:
        """Open an inbox for all sequences, and abort unfinished ones at the end."""
        inbox = self._channel.open(self._sequences)
        timer = self._start_timer(inbox)
        try:
            yield inbox
        finally:
            if timer is not None:
                timer.cancel()
            for sequence in self._sequences.values():
                if not sequence.finished:
                    sequence.abort()
            self._channel.close(self._sequences)

    async def _start(self, inbox: Inbox) -> None:
        for i, sequence in enumerate(list(self._sequences.values())):
            if i % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
                await asyncio.sleep(0)  # encoding a thousand requests at once would block all other streams
            sequence.start(inbox)

    def _take(self, delta: TokenDelta | None, inbox: Inbox) -> TextChunk | None:
        """Return the text of a delta, or None if it has nothing for the client."""
        if delta is None:
            self._check(inbox)
            return None
        live = self._sequences.get(delta.request_id)
        if live is None or live.finished:
            return None  # it belongs to an attempt that was given up
        try:
            chunk = live.add(delta)
        except AttemptError as error:
            self._go_on(live, error, inbox)
            return None
        self._num_unfinished -= live.finished
        return chunk

    def _check(self, inbox: Inbox) -> None:
        """Handle the events that come without a delta: the deadline, and lost attempts."""
        for sequence in [s for s in self._sequences.values() if not s.finished]:
            if self._timed_out:
                raise sequence.retry.timeout()
            if sequence.lost is not None and sequence in self._lost:
                self._go_on(sequence, sequence.lost, inbox)

    def _go_on(self, sequence: Sequence, error: BaseException, inbox: Inbox) -> None:
        failed = sequence.retry.request_id
        sequence.go_on(error, inbox)
        self._sequences[sequence.retry.request_id] = self._sequences.pop(failed)

    def _left_s(self) -> float | None:
        """Return the remaining seconds of the sequence with the latest deadline; None without a limit."""
        times = [s.retry.left_s(asyncio.get_running_loop().time()) for s in self._sequences.values()]
        return max((left_s for left_s in times if left_s is not None), default=None)

    def _start_timer(self, inbox: Inbox) -> asyncio.TimerHandle | None:
        left_s = self._left_s()
        if left_s is None:
            return None

        def expire() -> None:
            self._timed_out = True
            inbox.wake()

        return asyncio.get_running_loop().call_later(left_s + TIMEOUT_GRACE_S, expire)

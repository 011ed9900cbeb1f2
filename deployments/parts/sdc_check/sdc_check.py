"""Detects silent data corruption: another replica recomputes a sample of the answers (docs/sdc_check.md).

If answers have the same bits in any batch, the other replica generates the answer again, and both must be equal.
Otherwise the other replica computes the log-probability of each token of the answer, given the tokens before it, and
the log-probabilities must be about equal. Comparing a second generation would fail here: where two tokens are almost
equally likely, another choice changes all later tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from itertools import zip_longest
from statistics import fmean
from typing import Any

import msgspec

from deployments.frontend.admission import Admission
from deployments.frontend.inboxes import Inboxes
from deployments.frontend.observers import Reason, SequenceObserver, SequenceView
from deployments.frontend.retry import signed
from deployments.observability.stats import ModelStats
from deployments.openai.served.model_part import ModelPart
from deployments.replicas.pools import EnginePool
from engine.errors import EngineError, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams, seed_of
from engine.wire.token_delta import TokenDelta, TokenLogprob

logger = logging.getLogger(__name__)

Found = tuple[int | None, float | None]  # a token, and its log-probability

POLL_INTERVAL_S = 1.0  # between checks whether the engines are idle
MAX_WAITING = 8  # answers waiting to be recomputed; beyond that the oldest are dropped
TIMEOUT_S = 600.0  # of one computation
TOLERANCE = 1.0  # of one log-probability, where bits differ: logits of 16 to 32 are multiples of 1/8 in bfloat16
MEAN_TOLERANCE = 0.1  # of the mean over an answer's tokens, if it has MANY
MANY = 8


class SampledAnswer:
    """Tokens of an answer with their log-probabilities, whether or not the client asked for the latter."""

    def __init__(self, request: GenerateRequest):
        self._hidden = request.params.logprobs is None
        params = msgspec.structs.replace(request.params, logprobs=request.params.logprobs or 0)
        self.request = msgspec.structs.replace(request, params=params)
        """Request to send to the engine."""
        self.engine = ""
        """Id of the engine that computed the answer."""
        self.tokens: list[tuple[int, float]] = []
        """(token id, log-probability) of each token."""
        self.ranks: list[int] = []
        """Rank of each token; 1 is the most likely."""
        self.prompt_logprobs: list[TokenLogprob | None] = []

    def take(self, delta: TokenDelta, engine: str) -> TokenDelta:
        """Record a delta, and return it as the client asked for it."""
        self.engine = engine
        entries = delta.logprobs or []
        self.tokens += zip(delta.token_ids, [entry.logprob for entry in entries], strict=False)
        self.ranks += [entry.rank for entry in entries]
        self.prompt_logprobs += delta.prompt_logprobs or []
        return msgspec.structs.replace(delta, logprobs=None) if self._hidden else delta

    def again(self, reply_to: str) -> GenerateRequest:
        """Return a request that recomputes the same tokens."""
        params, count = self.request.params, len(self.tokens)
        again = msgspec.structs.replace(
            params,
            seed=signed(seed_of(self.request.request_id)) if params.seed is None else params.seed,
            max_tokens=count,
            min_tokens=min(params.min_tokens, count),
            prompt_logprobs=None,
        )
        return self._quietly(reply_to, params=again)

    def given(self, reply_to: str) -> GenerateRequest:
        """Return a request that computes the log-probability of each token except the last, given the tokens before
        it."""
        prompt = [*self.request.prompt, *(token for token, _ in self.tokens[:-1])]
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, prompt_logprobs=1, ignore_eos=True)
        return self._quietly(reply_to, params=params, prompt=prompt)

    def _quietly(self, reply_to: str, **changes: Any) -> GenerateRequest:
        """Return the request with `changes`. The new request uses no cached prefixes, and runs only in an idle
        engine."""
        return msgspec.structs.replace(
            self.request,
            request_id=f"sdc-check-{secrets.token_hex(8)}",
            reply_to=reply_to,
            cache_salt=secrets.token_hex(8),
            session_id="",
            hints={},
            when_idle=True,
            **changes,
        )


def first_difference(answer: SampledAnswer, again: SampledAnswer) -> tuple[int, Found, Found] | None:
    """Return the first position at which two answers differ, with both tokens and their log-probabilities; None if they
    are equal. again: the answer to the request that `answer.again` returned."""
    pairs = enumerate(zip_longest(answer.tokens, again.tokens, fillvalue=(None, None)))
    return next(((i, first, second) for i, (first, second) in pairs if first != second), None)


def far_difference(answer: SampledAnswer, given: SampledAnswer) -> tuple[int, Found, Found] | None:
    """Return the position of the largest difference, as in `first_difference`; None if all are small.

    given: the answer to the request that `answer.given` returned. A token that was the most likely one in `answer` must
    be almost the most likely one in `given`.
    """
    found, there = [], []
    entries = given.prompt_logprobs[len(answer.request.prompt) :]
    for (_, logprob), rank, entry in zip(answer.tokens, answer.ranks, entries, strict=False):
        assert entry is not None  # only the first of a prompt is
        margin = entry.top[0][1] - entry.logprob if rank == 1 else 0.0
        found.append(max(abs(entry.logprob - logprob), margin))
        there.append(entry.logprob)
    if not found or (max(found) <= TOLERANCE and (len(found) < MANY or fmean(found) <= MEAN_TOLERANCE)):
        return None
    position = max(range(len(found)), key=found.__getitem__)
    token, logprob = answer.tokens[position]
    return position, (token, logprob), (token, there[position])


class SampledSequence(SequenceObserver):
    """Fills in the answer of one sequence, which its client sees as without this."""

    def __init__(self, check: SdcCheck, sequence: SequenceView):
        self._check, self._sequence = check, sequence
        self._answer = SampledAnswer(sequence.retry.request)

    def sending(self, request: GenerateRequest) -> GenerateRequest:
        params = msgspec.structs.replace(request.params, logprobs=self._answer.request.params.logprobs)
        return msgspec.structs.replace(request, params=params)

    def received(self, delta: TokenDelta) -> TokenDelta:
        return self._answer.take(delta, self._sequence.engine)

    def ended(self, reason: Reason, error: Exception | None) -> None:
        if reason in ("stop", "length") and not self._sequence.retry.num_retries:
            self._check.ended(self._answer)


class SdcCheck(ModelPart):
    """Samples the answers of one model, and recomputes them while there are no requests."""

    def __init__(
        self,
        every: int,
        pool: EnginePool,
        channel: Inboxes,
        admission: Admission,
        stats: ModelStats,
        *,
        exact: bool,
    ):
        """every: one in this many answers is sampled. exact: whether answers have the same bits in any batch."""
        self._every, self._pool, self._channel, self._admission, self._stats = every, pool, channel, admission, stats
        self._request = SampledAnswer.again if exact else SampledAnswer.given
        self._difference = first_difference if exact else far_difference
        self._num_answers = 0
        self._waiting: deque[SampledAnswer] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def observer(self, sequence: SequenceView) -> SequenceObserver | None:
        """Return what fills in an answer if this sequence is sampled."""
        if sequence.retry.request.record(PoolingParams) is not None:
            return None
        self._num_answers += 1
        return None if self._num_answers % self._every else SampledSequence(self, sequence)

    def ended(self, answer: SampledAnswer) -> None:
        """Queue a complete answer, to be recomputed once the engines are idle."""
        self._waiting.append(answer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                if self._admission.num_running or self._admission.num_waiting or not await self._is_idle():
                    continue
                answer = self._waiting.popleft()
                again = await self._compute(answer)
            except (ServingError, TimeoutError) as error:
                logger.warning("answers not checked count=%d error=%s", len(self._waiting) + 1, error)
                self._waiting.clear()  # an engine is gone, or the model is scaled to zero
                continue
            if again is None:
                self._waiting.appendleft(answer)
            else:
                self._compare(answer, again)

    async def _is_idle(self) -> bool:
        """Return whether no engine has requests. Raises EngineUnavailable."""
        statuses = await self._pool.statuses()
        return not any(status.stats.running or status.stats.waiting for status in statuses)

    async def _compute(self, answer: SampledAnswer) -> SampledAnswer | None:
        """Return the answer of another engine, or of the same engine if there is no other. Returns None if a request
        interrupted it.

        Raises ServingError, TimeoutError.
        """
        again = SampledAnswer(self._request(answer, self._channel.address))
        request_id = again.request.request_id
        inbox = self._channel.open([request_id])
        call = asyncio.create_task(self._pool.generate(again.request, avoid=[answer.engine]))
        call.add_done_callback(lambda _: inbox.wake())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    for delta in await inbox.take():
                        if delta is None:
                            call.result()  # raises the call's error; the last delta may arrive after the call has ended
                        elif delta.finish_reason == "abort" or (delta.error and delta.error.code == "overloaded"):
                            return None
                        elif delta.error is not None:
                            raise EngineError(request_id, delta.error.message)
                        elif delta.position != len(again.tokens):
                            return None  # deltas were lost
                        else:
                            again.take(delta, self._channel.engine_of(request_id))
                            if delta.finish_reason is not None:
                                return again
        finally:
            call.cancel()
            self._channel.close([request_id])

    def _compare(self, answer: SampledAnswer, again: SampledAnswer) -> None:
        different = self._difference(answer, again)
        self._stats.sdc_checks["equal" if different is None else "different"] += 1
        if different is not None:
            position, (token, logprob), (token_again, logprob_again) = different
            logger.error(
                "answers differ request_id=%s position=%d engine=%s token=%s logprob=%r "
                "other_engine=%s other_token=%s other_logprob=%r",
                answer.request.request_id, position, answer.engine, token, logprob,
                again.engine, token_again, logprob_again,
            )  # fmt: skip

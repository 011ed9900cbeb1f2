"""Detects silent data corruption: another replica recomputes a sample of the answers, which must have the same bits
(docs/sdc_check.md)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from itertools import zip_longest

import msgspec

from deployments.frontend.admission import Admission
from deployments.frontend.retry import signed
from deployments.frontend.token_channel import TokenChannel
from deployments.observability.stats import ModelStats
from deployments.replicas.pools import EnginePool
from engine.errors import EngineError, ServingError
from engine.wire.messages import GenerateRequest, TokenDelta
from engine.wire.sampling_params import seed_of

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0  # between checks whether the engines are idle
MAX_WAITING = 8  # answers waiting to be recomputed; beyond that the oldest are dropped
TIMEOUT_S = 600.0  # of one computation


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

    def take(self, delta: TokenDelta, engine: str) -> TokenDelta:
        """Record a delta, and return it as the client asked for it."""
        self.engine = engine
        logprobs = [entry.logprob for entry in delta.logprobs or []]
        self.tokens += zip(delta.token_ids, logprobs, strict=False)
        return msgspec.structs.replace(delta, logprobs=None) if self._hidden else delta

    def again(self, reply_to: str) -> GenerateRequest:
        """Return a request that recomputes the same tokens, without cached prefixes and on an idle engine."""
        params, count = self.request.params, len(self.tokens)
        return msgspec.structs.replace(
            self.request,
            request_id=f"sdc-check-{secrets.token_hex(8)}",
            params=msgspec.structs.replace(
                params,
                seed=signed(seed_of(self.request.request_id)) if params.seed is None else params.seed,
                max_tokens=count,
                min_tokens=min(params.min_tokens, count),
                prompt_logprobs=None,
            ),
            reply_to=reply_to,
            cache_salt=secrets.token_hex(8),
            session_id="",
            prediction=[],
            when_idle=True,
        )


class SdcCheck:
    """Samples the answers of one model, and recomputes them while there are no requests."""

    def __init__(self, every: int, pool: EnginePool, channel: TokenChannel, admission: Admission, stats: ModelStats):
        """every: one in this many answers is sampled."""
        self._every, self._pool, self._channel, self._admission, self._stats = every, pool, channel, admission, stats
        self._num_answers = 0
        self._waiting: deque[SampledAnswer] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def sample(self, request: GenerateRequest) -> SampledAnswer | None:
        """Return an empty answer to fill in if this request is sampled, else None."""
        if request.pooling is not None:
            return None
        self._num_answers += 1
        return None if self._num_answers % self._every else SampledAnswer(request)

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
        """Return the answer of another engine, or of the same one if it is the only one; None if a request interrupted
        it.

        Raises ServingError, TimeoutError.
        """
        again = SampledAnswer(answer.again(self._channel.address))
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
        pairs = enumerate(zip_longest(answer.tokens, again.tokens, fillvalue=(None, None)))
        different = next(((i, first, second) for i, (first, second) in pairs if first != second), None)
        self._stats.sdc_checks["equal" if different is None else "different"] += 1
        if different is not None:
            position, (token, logprob), (token_again, logprob_again) = different
            logger.error(
                "answers differ request_id=%s position=%d engine=%s token=%s logprob=%r "
                "other_engine=%s other_token=%s other_logprob=%r",
                answer.request.request_id, position, answer.engine, token, logprob,
                again.engine, token_again, logprob_again,
            )  # fmt: skip

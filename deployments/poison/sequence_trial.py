"""One sequence as a suspect of ending its engines."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from deployments.frontend.observers import Reason, SequenceObserver, SequenceView
from deployments.poison.named import suspected
from deployments.poison.poison import Poison
from deployments.poison.trial import Trial
from engine.errors import EngineUnavailable
from engine.wire.generate_request import TRIAL_TOKENS, GenerateRequest
from engine.wire.token_delta import TokenDelta

logger = logging.getLogger(__name__)


class SequenceTrial(SequenceObserver):
    """Refuses a sequence that is poison. Tries one that is suspected apart from others, until it has got a few
    tokens."""

    def __init__(self, poison: Poison, sequence: SequenceView):
        self._poison, self._sequence = poison, sequence
        self._is_suspect = False  # whether an engine has ended by itself with what it names
        self._trial: Trial | None = None
        self._ends_at = 0  # number of tokens

    def waits(self) -> None:
        self._poison.check(self._sequence.retry.request, _now())

    async def attempting(self) -> None:
        retry = self._sequence.retry
        self._is_suspect = self._is_suspect or self._poison.suspects(retry.request, _now())
        if self._is_suspect:
            self._trial = await self._poison.begin_trial()
            self._ends_at = len(retry.output) + TRIAL_TOKENS
            self._poison.check(retry.request, _now())

    def sending(self, request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, on_trial=True) if self._is_suspect else request

    def delta(self, delta: TokenDelta, num_tokens: int) -> None:
        if self._trial is None:
            return
        retry = self._sequence.retry
        if delta.finish_reason is not None or len(retry.output) >= self._ends_at:
            self._is_suspect = False
            self._poison.survived(retry.request)
            self._end()

    def failed(self, error: BaseException) -> BaseException:
        """Return a PoisonRequest if engines have ended by themselves with this attempt and with an earlier one."""
        self._end()
        retry = self._sequence.retry
        doing = error.doing if isinstance(error, EngineUnavailable) else ()
        named = suspected(retry.request, retry.request_id, doing, began=bool(retry.output))
        if named is None:
            return error
        poison = self._poison.blame(named, doing, self._is_suspect, _now())
        self._is_suspect = True
        if poison is None:
            return error
        logger.error("request is poison request_id=%s: %s; the last: %s", retry.request_id, poison, error)
        return poison

    def ended(self, reason: Reason, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None


def _now() -> float:
    return asyncio.get_running_loop().time()

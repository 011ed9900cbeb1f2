"""What happens to the sequences of a request that is a turn of a session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from deployments.billing.bill import Bill
from deployments.billing.prices import FREE
from deployments.frontend.observers import GenerationObserver, Reason, RequestSize, SequenceObserver, SequenceView
from deployments.observability.telemetry import current_request
from deployments.openai.served.model_part import ModelPart
from deployments.openai.served.served_model import ModelInfo
from deployments.parts.sessions.call import current_call
from deployments.parts.sessions.live_turn import LiveTurn
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.costs import ReportCost
from engine.wire.token_delta import TokenDelta


class SessionSequences(ModelPart):
    """Finds the session of each request of a model."""

    def __init__(self, info: ModelInfo):
        self._name, self._has_prices = info.name, info.prices != FREE

    def observer(self, sequence: SequenceView) -> SequenceObserver | None:
        """Raises InvalidParameter."""
        call, request = current_call(), sequence.retry.request
        if call is None or not request.session_id:
            return None
        adapter = request.record(ModelAdapter)
        name = self._name if adapter is None else adapter.name
        return SessionSequence(call.turn_of(request, name, has_prices=self._has_prices), sequence)

    def generation_observer(self, size: RequestSize, bill: Bill) -> GenerationObserver | None:
        """Raises InvalidParameter."""
        if (call := current_call()) is None:
            return None
        call.check_named()
        return None if call.turn is None else SessionGeneration(call.turn, size, bill)


class SessionGeneration(GenerationObserver):
    """Begins and ends a turn, and takes of its budgets what it needs."""

    def __init__(self, turn: LiveTurn, size: RequestSize, bill: Bill):
        self._turn, self._size, self._bill = turn, size, bill

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        await self._turn.enter(self._size, self._bill)
        try:
            yield
        finally:
            self._turn.leave(self._bill)

    async def taking(self, num_tokens: int) -> None:
        await self._turn.renew(num_tokens)


class SessionSequence(SequenceObserver):
    """Notes where a sequence runs and how long it waits, and ends it when a budget is used up."""

    def __init__(self, turn: LiveTurn, sequence: SequenceView):
        self._turn, self._sequence, self._started_at = turn, sequence, current_request().started_at
        self._waits_at = self._wait_s = 0.0
        self._begins = True
        turn.num_open += 1

    def waits(self) -> None:
        self._waits_at = time.monotonic()

    def admitted(self) -> None:
        self._wait_s = time.monotonic() - self._waits_at

    def sending(self, request: GenerateRequest) -> GenerateRequest:
        return request.asking(ReportCost()) if self._turn.watches_cost else request

    def sent(self, request_id: str) -> None:
        self._begins = True

    def received(self, delta: TokenDelta) -> TokenDelta:
        """End the sequence at the token, as at `max_tokens`, with which a budget is used up."""
        num_tokens = self._turn.take(len(delta.token_ids))
        if num_tokens == len(delta.token_ids) and (delta.finish_reason is not None or not self._turn.over):
            return delta
        return msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[:num_tokens],
            logprobs=None if delta.logprobs is None else delta.logprobs[:num_tokens],
            finish_reason="length",
            stop_reason=None,
            text_complete=False,
        )

    def delta(self, delta: TokenDelta, num_tokens: int) -> None:
        if not self._begins:
            return
        self._begins, turn = False, self._turn.turn
        if self._sequence.engine not in turn.engines:
            turn.engines = [*turn.engines, self._sequence.engine]
        if turn.first_token_s is None:
            turn.first_token_s = time.monotonic() - self._started_at
            turn.wait_s = self._wait_s + (0.0 if delta.times is None else delta.times.scheduled_s)

    def ended(self, reason: Reason, error: Exception | None) -> None:
        turn = self._turn
        turn.num_open -= 1
        turn.turn.finish_reason = "budget" if reason == "length" and turn.over else reason
        turn.close()

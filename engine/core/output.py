"""Output of a step for the clients, and the conditions that end a request."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.core.request import Request
from engine.errors import ServingError
from engine.wire.part_record import told
from engine.wire.token_delta import ErrorInfo, FinishReason, TokenDelta, TokenLogprob


class Event(msgspec.Struct, frozen=True, gc=False):
    """Output of a step for one request."""

    request: Request
    delta: TokenDelta


def tokens_delta(
    request: Request, position: int, logprobs: list[TokenLogprob] | None, now: float, *, first: bool
) -> TokenDelta:
    """Return a request's output from output token `position` on. logprobs: those of the returned tokens, possibly
    followed by more. first: True if the output starts with the first token that this engine sampled."""
    tokens = request.tokens[request.num_prompt + position :]
    if not (first or logprobs or request.timeline or request.news):
        return TokenDelta(request_id=request.request_id, position=position, token_ids=tokens)
    return TokenDelta(
        request_id=request.request_id,
        position=position,
        token_ids=tokens,
        logprobs=None if logprobs is None else logprobs[: len(tokens)],
        num_cached_tokens=request.prefix.num_cached if first else 0,
        prompt_logprobs=request.prompt_logprobs if first else None,
        times=request.times(now) if first else None,
        timeline=request.take_timeline(),
        parts=told(request.take_news()),
    )


def last_delta(
    request: Request, delta: TokenDelta | None, reason: FinishReason, now: float, error: ServingError | None
) -> TokenDelta:
    """Return the final delta of a request. delta: its last tokens, or None if it ends without new tokens."""
    delta = delta or TokenDelta(request_id=request.request_id, position=request.num_output)
    return msgspec.structs.replace(
        delta,
        finish_reason=reason,
        error=ErrorInfo.of(error) if error else None,
        times=request.times(now),
        num_preemptions=request.num_preemptions,
        timeline=[*delta.timeline, *request.take_timeline()],
    )


def take_timelines(requests: Iterable[Request], before: float) -> list[Event]:
    """Return deltas without tokens for requests with timeline events older than `before` (seconds since 1970)."""
    return [
        Event(r, TokenDelta(request_id=r.request_id, position=r.num_output, timeline=r.take_timeline()))
        for r in requests
        if r.timeline and r.timeline[0].at < before and not r.asked_by
    ]


class StopConditions:
    """Conditions that end the output of a model."""

    def __init__(self, eos_token_ids: frozenset[int]):
        self._eos_token_ids = eos_token_ids

    def reason(self, request: Request, token: int, num_output: int) -> FinishReason | None:
        """Return why `token`, the newest token of a request, ends the request; None if it does not. num_output: number
        of output tokens so far, including `token`."""
        params = request.params
        if token in self._eos_token_ids and not params.ignore_eos:
            return "stop"
        if token in params.stop_token_ids or (request.constraint is not None and request.constraint.is_done):
            return "stop"
        return "length" if num_output >= request.max_tokens else None

    def named(self, request: Request, delta: TokenDelta) -> TokenDelta:
        """Return the final delta, with the stop token that ended the request. End-of-sequence tokens are left out."""
        token = delta.token_ids[-1]
        if token in self._eos_token_ids and not request.params.ignore_eos:
            return delta
        if token in request.params.stop_token_ids:
            return msgspec.structs.replace(delta, stop_reason=token)
        return msgspec.structs.replace(delta, text_complete=True)

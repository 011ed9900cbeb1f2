"""What an engine answers to a request: a TokenBatch to each ingress that has requests there, one per step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.wire.remote_request import KVSource
from engine.wire.timeline import TimelineEvent

FinishReason = Literal["stop", "length", "abort", "error"]
HoldRefusal = Literal["off", "ttl", "short", "not_cached", "client_full", "full"]
# off: the engine keeps no holds. ttl: longer than max_hold_s. short: no full block before the mark. not_cached: the
# engine does not keep the blocks. client_full, full: the share of the client, or of all clients, is taken.


class HoldOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's answer to a HoldMark."""

    tokens: int
    """Tokens that are kept; those that the mark asked for if the hold is refused."""
    ttl_s: float
    refusal: HoldRefusal | None = None
    """None if the hold is granted."""
    reason: str = ""
    """A sentence about the refusal."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and of the most likely tokens at its position.

    Computed from the raw logits, before penalties and temperature, like vLLM's `raw_logprobs`.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first."""


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A ServingError in transit."""

    code: str
    message: str
    status: int
    retryable: bool
    type: str
    param: str | None = None

    @classmethod
    def of(cls, error: ServingError) -> ErrorInfo:
        return cls(error.code, str(error), error.status, error.retryable, error.type, error.param)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds since the request's arrival in the engine, on its monotonic clock."""

    scheduled_s: float
    first_token_s: float
    finished_s: float
    handoff_s: tuple[float, float] | None = None
    """Start and end of the last attempt to let another engine compute the prompt."""


class SequenceCost(msgspec.Struct, frozen=True):
    """What a request has cost the engines."""

    compute_s: float
    """Its share of the time of all steps; the part of an engine that computed its prompt is included."""
    wasted_s: float
    """Its share for tokens that were computed again, which is not in `compute_s`."""
    kv_gib_s: float
    """Gibibytes of KV cache times the seconds for which it held them. Shared blocks are divided among their holders; of
    a hold, the request that uses it pays for the blocks."""
    tier_gib_s: float = 0.0
    """The same for the blocks of holds in tiers below the KV cache."""

    @classmethod
    def total(cls, costs: Collection[SequenceCost]) -> SequenceCost:
        """Return what several attempts or sequences have cost together."""
        return cls(*(sum(getattr(cost, name) for cost in costs) for name in cls.__struct_fields__))


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output of one step for one request. The delta with a `finish_reason` is the last.

    A delta with neither tokens nor `finish_reason` only carries timeline events of a request that waits for a token.
    """

    request_id: str
    position: int = 0
    """Position of the first token in the sequence's output. Set even without tokens, but not with an error."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token, of which the first is None; given with the first token if requested."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; given with the first token."""
    holds: list[HoldOutcome] = []
    """Answers to the marks of `hold`; given with the first token."""
    prediction_tokens: tuple[int, int] | None = None
    """Numbers of predicted tokens accepted and rejected in this step; None if none was verified."""
    pooled: bytes = b""
    """Vector or score of a request with `pooling`: float32, little endian. Such a request has only one delta."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Stop token id that ended the sequence, if it is one of `stop_token_ids`."""
    text_complete: bool = False
    """True if the grammar ended the sequence (`stop`): its last token is then text, not a stop token."""
    error: ErrorInfo | None = None
    kv_source: KVSource | None = None
    """Engine that holds the KV of a request that moves (error `moved`); None if it cannot be handed over."""
    times: RequestTimes | None = None
    """Given with the first token, and with the last delta of a request that was scheduled."""
    cost: SequenceCost | None = None
    """Cost of the request so far in this engine. Given with the last delta, and with others if they are asked to
    (`ReportCost`)."""
    num_preemptions: int = 0
    timeline: list[TimelineEvent] = []
    """Events of the request in its engines since the previous delta."""


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one engine step for one ingress."""

    engine_id: str
    commands_to: str
    """ZMQ address on which the engine takes commands."""
    step: int
    deltas: list[TokenDelta]

"""What an engine answers to a request: a TokenBatch to each ingress that has requests there, one per step."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.wire.part_record import PartRecord, R, Told, decoded, told
from engine.wire.timeline import TimelineEvent

FinishReason = Literal["stop", "length", "abort", "error"]


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
    answer: bytes = b""
    """What a part answers instead of tokens: a vector or score in float32, little endian. There is then one delta."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Stop token id that ended the sequence, if it is one of `stop_token_ids`."""
    text_complete: bool = False
    """True if the grammar ended the sequence (`stop`): its last token is then text, not a stop token."""
    error: ErrorInfo | None = None
    times: RequestTimes | None = None
    """Given with the first token, and with the last delta of a request that was scheduled."""
    num_preemptions: int = 0
    timeline: list[TimelineEvent] = []
    """Events of the request in its engines since the previous delta."""
    parts: Told = []
    """What parts of the engine tell of the request."""

    def records(self, kind: type[R]) -> list[R]:
        """Return the records of this kind, in their order."""
        return [decoded(raw, kind) for name, raw in self.parts if name == kind.__name__]

    def telling(self, *records: PartRecord) -> TokenDelta:
        """Return the delta with these records too, after the others."""
        return msgspec.structs.replace(self, parts=[*self.parts, *told(records)])


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one engine step for one ingress."""

    engine_id: str
    commands_to: str
    """ZMQ address on which the engine takes commands."""
    step: int
    deltas: list[TokenDelta]
    numerics: str = ""
    """Digest of what the engine computes with: with another one, the same request may get another text."""

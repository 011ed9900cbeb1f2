"""What travels between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      Add, Abort                       (`Command`)
From the engine:    TokenBatch to each ingress that has requests there, one per step;
                    EngineStatus to the replica's control actor, at least once a second.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, in token ids. `n > 1` was split up before this point.

    request_id: unique among live requests of one engine; also the source of the seed when none is given.
    reply_to: ZMQ address of the ingress' token channel; empty for in-process use.
    timeout_s: seconds that the engine may take from arrival; None for no limit.
    priority: smaller runs first, used by the `priority` policy only.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    reply_to: str = ""
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and of the most likely ones at its position.

    Taken from the raw logits, before penalties and temperature, as vLLM's `raw_logprobs`.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A ServingError in transit."""

    code: str
    message: str
    status: int
    retryable: bool
    type: str

    @classmethod
    def of(cls, error: ServingError) -> ErrorInfo:
        return cls(error.code, str(error), error.status, error.retryable, error.type)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds, on the engine's monotonic clock, relative to the request's arrival there."""

    scheduled_s: float
    first_token_s: float
    finished_s: float


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one request. The delta with a `finish_reason` is the last.

    stop_reason: the stop token id that ended it, if it was one of `stop_token_ids`.
    num_cached_tokens: prompt tokens that came from the prefix cache; given with the first token.
    prompt_logprobs: one per prompt token, the first None; given with the first token if asked for.
    times: given with the last delta of a request that was scheduled at all.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: ErrorInfo | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one engine step for one ingress."""

    engine_id: str
    step: int
    deltas: list[TokenDelta]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine now, and totals since its start. Blocks: total = free + cached + used."""

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    block_size: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    finished: dict[str, int]  # by finish reason


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """To the control actor: which requests ended since the last status, and how the engine is doing."""

    engine_id: str
    ended: list[str]
    stats: EngineStats
    last_step_age_s: float  # 0 when there is nothing to do


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; unknown ids are ignored (it may just have finished).

    reason: `stop` when its text has reached a stop string, which an engine knows nothing of.
    """

    request_id: str
    reason: Literal["abort", "stop"] = "abort"


Command = Add | Abort

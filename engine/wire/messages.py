"""What travels between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      Add, Abort, Subscribe; Prefill, CancelPrefill (to one that computes prompts for others);
                    RemotePrefillFailed, PrefillReplicas (to one that has its prompts computed)         (`Command`)
From the engine:    TokenBatch to each ingress that has requests there, one per step;
                    EngineUpdate to each router that subscribes;
                    to the replica's control actor (`Notice`) EngineStatus, at least once a second, and from one that
                    has its prompts computed DispatchPrefill and CancelDispatch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.histogram import Histogram
from engine.wire.model_identity import ModelIdentity
from engine.wire.remote_prefill import RemotePrefillRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LIVE_HANDOFFS = 200  # in one status
SUBSCRIPTION_S = 30.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, in token ids. `n > 1` was split up before this point.

    request_id: unique among live requests of one engine; also the source of the seed when none is given.
    reply_to: ZMQ address of the ingress' token channel; empty for in-process use.
    timeout_s: seconds that the engine may take from arrival; None for no limit.
    priority: smaller runs first, used by the `priority` policy only.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    prefill: where the prompt is computed; with `remote` the request fails where it would else be computed here.
    model: a replica of another one refuses the request; None goes anywhere.
    num_prompt: tokens of `prompt` from here on are output that another replica has given already; they count as output
        for penalties, min_tokens and max_tokens. None for all of it.
    session_id: requests of one session should meet in one engine; for routers, engines ignore it.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    reply_to: str = ""
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    prefill: Literal["auto", "local", "remote"] = "auto"
    num_prompt: int | None = None
    model: ModelIdentity | None = None
    session_id: str = ""


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
    param: str | None = None

    @classmethod
    def of(cls, error: ServingError) -> ErrorInfo:
        return cls(error.code, str(error), error.status, error.retryable, error.type, error.param)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds, on the engine's monotonic clock, relative to the request's arrival there.

    handoff_s: start and end of the last attempt to have its prompt computed by another engine.
    """

    scheduled_s: float
    first_token_s: float
    finished_s: float
    handoff_s: tuple[float, float] | None = None


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one request. The delta with a `finish_reason` is the last.

    One without tokens and `finish_reason` only brings what happened to a request that has no token for long.

    position: in the sequence's output, of the first token here; also without a token, but not with an error.
    stop_reason: the stop token id that ended it, if it was one of `stop_token_ids`.
    num_cached_tokens: prompt tokens that came from the prefix cache; given with the first token.
    prompt_logprobs: one per prompt token, the first None; given with the first token if asked for.
    text_complete: with finish_reason `stop`: its grammar ended it, so the last token is text, not a token that stops.
    times: given with the first token, and with the last delta of a request that was scheduled at all.
    timeline: what happened to the request in its engines since the delta before.
    """

    request_id: str
    position: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    text_complete: bool = False
    error: ErrorInfo | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0
    timeline: list[TimelineEvent] = []


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one engine step for one ingress.

    commands_to: ZMQ address where the engine takes commands.
    """

    engine_id: str
    commands_to: str
    step: int
    deltas: list[TokenDelta]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine now, and totals since its start.

    Blocks: total = free + cached + used, and used = held by running requests + reserved + leased.
    blocks_reserved: that only requests hold whose KV comes from another engine, or has come and waits for a slot.
    blocks_leased: that only computed prompts hold, which another engine may still read.
    receiving, leased: such requests. queued_tokens: prompt tokens that are still to be computed.
    seconds_per_step, seconds_per_token: what a step costs here, fitted as it runs; 0 where not known yet.
    decode_seconds_per_step, decode_seconds_per_sequence: the same of steps that only decode.
    prompt_seconds_per_token: of computing prompts, all told, beside the decoding of others in the same step.
    prefill_tokens, prefills: prompt tokens that steps computed here, and prompts that they computed to their end.
    prefill_decisions: where prompts were sent to be computed, and why: {"local": {"short_prompt": 3}, "remote": ...}.
    """

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
    blocks_reserved: int = 0
    blocks_leased: int = 0
    receiving: int = 0
    leased: int = 0
    queued_tokens: int = 0
    seconds_per_step: float = 0.0
    seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    decode_seconds_per_sequence: float = 0.0
    prompt_seconds_per_token: float = 0.0
    prefill_tokens: int = 0
    prefills: int = 0
    prefill_decisions: dict[str, dict[str, int]] = {}
    histograms: dict[str, Histogram] = {}  # by the names of engine/core/stats.py


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the control actor: which requests ended since the last status, and how the engine is doing.

    ended: ids of requests, and of handoffs that were computed here for another engine.
    last_step_age_s: 0 when there is nothing to compute.
    handoffs: what `EngineConfig.handoff` asks for; None without. live_handoffs: at most MAX_LIVE_HANDOFFS of them.
    fingerprint: what engines must have in common to hand KV over; empty without `handoff`.
    """

    engine_id: str
    ended: list[str]
    stats: EngineStats
    last_step_age_s: float
    handoffs: HandoffStats | None = None
    live_handoffs: list[HandoffInfo] = []
    fingerprint: str = ""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one engine has to do, for whoever chooses between engines.

    sequences: that run, wait, or wait for their KV; each needs one of `slots` to run.
    queued_tokens: prompt tokens that are still to be computed. blocks_used: of `blocks_total` KV blocks.
    slots, blocks_total: 0 where nothing is known of the engine.
    """

    sequences: int = 0
    queued_tokens: int = 0
    blocks_used: int = 0
    slots: int = 0
    blocks_total: int = 0


class EngineUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine and its KV events since the update before, sent to every router that subscribes.

    number: one more than that of the update before, so that a lost one is noticed.
    snapshot: `stored` and `admitted` are complete, not changes.
    stored, removed: hashes of KV blocks that can be matched from now on, and of those that no longer can;
        BLOCK_HASH_BYTES each.
    admitted: requests and remote prefills that arrived; `load` includes them.
    prefilled: admitted requests whose prompt is computed, or that ended; each with its number of cached prompt
        tokens, or -1 if it never ran.
    """

    engine_id: str
    number: int
    snapshot: bool
    load: EngineLoad
    stored: bytes
    removed: bytes
    admitted: list[str]
    prefilled: list[tuple[str, int]]


class DispatchPrefill(msgspec.Struct, frozen=True, tag=True):
    """To the control actor: have some prefill engine take this prefill request (Prefill); tell RemotePrefillFailed if none does,
    or if the call fails before the engine has taken it."""

    request: RemotePrefillRequest


class CancelDispatch(msgspec.Struct, frozen=True, tag=True):
    """To the control actor: the call that carries this prefill request is of no use any more."""

    handoff_id: str


Notice = EngineStatus | DispatchPrefill | CancelDispatch


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; unknown ids are ignored (it may just have finished).

    reason: `stop` when its text has reached a stop string, which an engine knows nothing of.
    """

    request_id: str
    reason: Literal["abort", "stop"] = "abort"


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Send each EngineUpdate to `address` for the next SUBSCRIPTION_S, a snapshot first unless that has been sent.

    resync: send a snapshot in any case, since a message was lost.
    """

    address: str
    resync: bool = False


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt for another engine. `EngineStatus.ended` names the handoff when it is over, however it ends."""

    request: RemotePrefillRequest


class CancelPrefill(msgspec.Struct, frozen=True, tag=True):
    """The caller of the prefill request is gone."""

    handoff_id: str


class RemotePrefillFailed(msgspec.Struct, frozen=True, tag=True):
    """No prefill engine has the prefill request. retry: another attempt may succeed."""

    handoff_id: str
    reason: str
    retry: bool


class PrefillReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that computes prompts, by its newest EngineStats."""

    engine_id: str
    queued_tokens: int = 0
    seconds_per_step: float = 0.0
    seconds_per_token: float = 0.0

    @classmethod
    def of(cls, status: EngineStatus) -> PrefillReplica:
        stats = status.stats
        return cls(
            engine_id=status.engine_id,
            queued_tokens=stats.queued_tokens,
            seconds_per_step=stats.seconds_per_step,
            seconds_per_token=stats.seconds_per_token,
        )


class PrefillReplicas(msgspec.Struct, frozen=True, tag=True):
    """The prefill engines that are alive, about once a second."""

    replicas: list[PrefillReplica]


Command = Add | Abort | Subscribe | Prefill | CancelPrefill | RemotePrefillFailed | PrefillReplicas

"""Messages between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      Add, Abort, Subscribe, ResetPrefixCache;
                    Prefill, CancelPrefill (to one that computes prompts for others);
                    RemoteRequestFailed, PrefillReplicas (to one whose prompts others compute)          (`Command`)
From the engine:    TokenBatch to each ingress that has requests there, one per step;
                    EngineUpdate to each router that subscribes;
                    to the replica's control actor (`Notice`) EngineStatus, at least once a second, and from an engine
                    whose prompts others compute DispatchRemote and CancelDispatch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.histogram import Histogram
from engine.wire.model_identity import ModelIdentity
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_request import RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent

PeerPool = Literal["prefill", "encode"]  # of engines that compute for others
FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LIVE_HANDOFFS = 200  # per status
SUBSCRIPTION_S = 30.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate or to pool, in token ids. `n > 1` was split up before this point."""

    request_id: str
    """Unique among the live requests of an engine; also the source of the seed if none is given."""
    prompt: list[int]
    mm_features: list[MultiModalFeatureSpec] = []
    """Images of the prompt, by their place in it; they do not overlap."""
    params: SamplingParams = SamplingParams()
    pooling: PoolingParams | None = None
    """Asks for a vector or a score instead of tokens; `params` is then without effect."""
    reply_to: str = ""
    """ZMQ address of the ingress's token channel; empty for in-process use."""
    client: str = ""
    """Client whose turn its grammar takes to be compiled."""
    timeout_s: float | None = None
    """Time that the engine may take from arrival; None for no limit."""
    priority: int = 0
    """Smaller runs first; used by the `priority` policy only."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    prediction: list[int] = []
    """What the client takes the output to be; followed by engines that draft tokens, ignored by others."""
    prefill: Literal["auto", "local", "remote"] = "auto"
    """Where the prompt is computed; with `remote` the request fails if it would otherwise be computed locally."""
    num_prompt: int | None = None
    """Tokens of `prompt` from this one on are output that another replica already gave: they count as output for
    penalties, min_tokens and max_tokens. None if all of it is prompt."""
    model: ModelIdentity | None = None
    """A replica of another model refuses the request; None is accepted by any."""
    session_id: str = ""
    """Requests of one session should meet in one engine; read by routers, ignored by engines."""
    when_idle: bool = False
    """Refused by an engine that has other work, and aborted there once other work comes."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and of the most likely ones at its position.

    Taken from the raw logits, before penalties and temperature, as vLLM's `raw_logprobs`.
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
    """Start and end of the last attempt to have the prompt computed by another engine."""


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output of one step for one request. The delta with a `finish_reason` is the last.

    A delta without tokens and `finish_reason` only brings the timeline of a request that waits for a token.
    """

    request_id: str
    position: int = 0
    """Position of the first token in the sequence's output; also given without a token, but not with an error."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token, the first None; given with the first token if asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; given with the first token."""
    prediction_tokens: tuple[int, int] | None = None
    """Tokens of the request's prediction that were accepted and rejected in this step; None if none was verified."""
    pooled: bytes = b""
    """The vector or the score of a request with `pooling`, in float32, little endian; given with the only delta."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Stop token id that ended the sequence, if it is one of `stop_token_ids`."""
    text_complete: bool = False
    """The grammar ended the sequence (`stop`), so its last token is text and no stop token."""
    error: ErrorInfo | None = None
    times: RequestTimes | None = None
    """Given with the first token, and with the last delta of a request that was scheduled."""
    num_preemptions: int = 0
    timeline: list[TimelineEvent] = []
    """Events of the request in its engines since the delta before."""


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one engine step for one ingress."""

    engine_id: str
    commands_to: str
    """ZMQ address where the engine takes commands."""
    step: int
    deltas: list[TokenDelta]


class SpecDecodeStats(msgspec.Struct, kw_only=True):
    """Totals of speculative decoding; vLLM's metrics of these names."""

    num_drafts: int = 0
    """Steps of a sequence that verified drafted tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted tokens by their position in a draft, the first one first."""

    def observe(self, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position += [0] * (drafted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of one engine, and totals since its start.

    Blocks: total = free + cached + used, and used = held by running requests + reserved + leased.
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
    finished: dict[str, int]
    """Requests that ended, by finish reason."""
    group_blocks: dict[str, dict[str, int]] = {}
    """Blocks of each KV cache group that are `used`, `cached` and `free`, by its number, where there are several; the
    fields above are of the first."""
    blocks_reserved: int = 0
    """Blocks that only requests hold whose KV comes from another engine, or has come and waits for a slot."""
    blocks_leased: int = 0
    """Blocks that only computed prompts hold which another engine may still read."""
    receiving: int = 0
    """Requests whose KV comes from another engine."""
    leased: int = 0
    """Computed prompts whose blocks another engine may still read."""
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    seconds_per_step: float = 0.0
    """Fixed cost of a step, fitted while the engine runs; 0 while unknown."""
    seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    """Fixed cost of a step that only decodes."""
    decode_seconds_per_sequence: float = 0.0
    prompt_seconds_per_token: float = 0.0
    """Cost of a prompt token, fixed costs included, without the decodes of the same step."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed here."""
    prefills: int = 0
    """Prompts that were computed here to their end."""
    prefill_decisions: dict[str, dict[str, int]] = {}
    """Where prompts were sent to be computed, and why: {"local": {"short_prompt": 3}, "remote": ...}."""
    images_encoded: int = 0
    """Images that the vision encoder has computed."""
    encoder_cache_hits: int = 0
    """Times that a step found the embeddings of an image there already."""
    spec_decode: SpecDecodeStats | None = None
    """None without speculative decoding."""
    histograms: dict[str, Histogram] = {}
    """Histograms by the names that engine/core/stats.py gives them."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tells the control actor which requests ended since the last status, and how the engine is doing."""

    engine_id: str
    ended: list[str]
    """Ids of requests, and of handoffs that were computed here for another engine."""
    stats: EngineStats
    last_step_age_s: float
    """0 when there is nothing to compute."""
    handoffs: HandoffStats | None = None
    """None without `EngineConfig.handoff`."""
    image_handoffs: HandoffStats | None = None
    """Those with encode engines; None without `EngineConfig.encode`."""
    live_handoffs: list[HandoffInfo] = []
    """The newest handoffs in flight, at most MAX_LIVE_HANDOFFS of them."""
    fingerprint: str = ""
    """Equal in engines that can hand KV over to each other; empty without `handoff`."""
    encode_fingerprint: str = ""
    """That of encode engines which can hand images over to this one; empty without `encode`."""
    refused: dict[str, dict[str, int]] = {}
    """What the sockets of its ranks have refused, by socket and reason (engine/distributed/refusals.py)."""

    def with_pool(self, pool: PeerPool) -> tuple[str, HandoffStats | None]:
        """Return the fingerprint of the engines of a pool that can compute for this one, and the handoffs with them."""
        return (self.encode_fingerprint, self.image_handoffs) if pool == "encode" else (self.fingerprint, self.handoffs)


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Work of one engine, for those who choose between engines. All 0 if nothing is known of the engine."""

    sequences: int = 0
    """Sequences that run, wait, or wait for their KV; each needs one of `slots` to run."""
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    blocks_used: int = 0
    slots: int = 0
    blocks_total: int = 0
    queued_embeds: int = 0
    """Embeddings of images that are still to be made by the vision encoder."""


class EngineUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine and its KV events since the update before, sent to every router that subscribes."""

    engine_id: str
    number: int
    """One more than that of the update before, so that a lost one is noticed."""
    snapshot: bool
    """`stored` and `admitted` are complete, not changes."""
    load: EngineLoad
    stored: bytes
    """Hashes of KV blocks that can be matched from now on, BLOCK_HASH_BYTES each."""
    removed: bytes
    """Hashes of KV blocks that can no longer be matched."""
    admitted: list[str]
    """Requests and remote prefills that arrived; `load` includes them."""
    prefilled: list[tuple[str, int]]
    """Admitted requests whose prompt is computed, or that ended, with their number of cached prompt tokens, or -1 if
    they never ran."""


class DispatchRemote(msgspec.Struct, frozen=True, tag=True):
    """Asks the control actor to send a prompt to a prefill engine (Prefill). It answers RemoteRequestFailed if none
    accepts it, or if the call fails before."""

    request: RemoteRequest
    pool: PeerPool = "prefill"


class CancelDispatch(msgspec.Struct, frozen=True, tag=True):
    """Tells the control actor that the call of a DispatchRemote is no longer needed."""

    handoff_id: str


Notice = EngineStatus | DispatchRemote | CancelDispatch


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; unknown ids are ignored (it may just have finished)."""

    request_id: str
    reason: Literal["abort", "stop"] = "abort"
    """`stop` if its text has reached a stop string, which an engine cannot see."""


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Send each EngineUpdate to `address` for the next SUBSCRIPTION_S, a snapshot first unless that has been sent."""

    address: str
    resync: bool = False
    """Send a snapshot in any case, since an update was lost."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt for another engine. `EngineStatus.ended` names the handoff when it is over, however it ends."""

    request: RemoteRequest


class CancelPrefill(msgspec.Struct, frozen=True, tag=True):
    """End a prompt of another engine: the call that brought it is gone."""

    handoff_id: str


class RemoteRequestFailed(msgspec.Struct, frozen=True, tag=True):
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
    """The prefill engines, or the encode engines, that are alive, about once a second."""

    replicas: list[PrefillReplica]
    pool: PeerPool = "prefill"


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Compute prompts again, and use no cached prefix."""


Command = Add | Abort | Subscribe | ResetPrefixCache | Prefill | CancelPrefill | RemoteRequestFailed | PrefillReplicas

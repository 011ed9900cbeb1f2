"""Messages between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      Add, Abort, MoveRequests, GiveHolds, Drain, Subscribe, ResetPrefixCache, ReleaseHolds, LoadAdapter,
                    TakeTape;
                    Prefill, CancelPrefill (to an engine that computes prompts for others);
                    RemoteRequestFailed, PrefillReplicas (to an engine whose prompts others compute)    (`Command`)
From the engine:    TokenBatch to each ingress that has requests there, one per step;
                    EngineUpdate to each router that subscribes;
                    to the replica's control actor (`Notice`) EngineStatus, at least once a second, AdapterLoaded,
                    HeldPrompts, TapeTaken, and from an engine whose prompts others compute DispatchRemote and
                    CancelDispatch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from engine.errors import ServingError
from engine.wire.handoff_stats import HandoffInfo, HandoffStats, Role
from engine.wire.histogram import Histogram
from engine.wire.kv_offload import KVOffloadStats
from engine.wire.lora import LoRARequest
from engine.wire.model_identity import ModelIdentity
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.remote_request import KVHolder, KVSource, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.timeline import TimelineEvent

PeerPool = Literal["prefill", "encode"]  # of engines that compute for others
FinishReason = Literal["stop", "length", "abort", "error"]
HoldRefusal = Literal["off", "ttl", "short", "not_cached", "client_full", "full"]
# off: the engine keeps no holds. ttl: longer than max_hold_s. short: no full block before the mark. not_cached: the
# engine does not keep the blocks. client_full, full: the share of the client, or of all clients, is taken.
HoldEnd = Literal["expired", "released", "cleared", "invalid", "lost"]
# cleared: the prefix cache was emptied. invalid: the numbers in its blocks may not be finite. lost: a tier lost a
# block.
MAX_LIVE_HANDOFFS = 200  # in one EngineStatus
SUBSCRIPTION_S = 30.0


class HoldMark(msgspec.Struct, frozen=True, array_like=True):
    """Asks to keep the first `tokens` tokens of a prompt for `ttl_s` seconds after their last use."""

    tokens: int
    ttl_s: float
    left_s: float | None = None
    """Seconds until its first end, if another engine has kept them for a part of the time; None for `ttl_s`."""


class PromptHold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The holds that one request asks for."""

    marks: list[HoldMark]
    """In ascending order."""
    response_id: str = ""
    """Id of the response, by which the holds can be released."""
    name: str = ""
    """Name that the client gives to its conversation; the holds can be released by it too."""


class HoldOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's answer to a HoldMark."""

    tokens: int
    """Tokens that are kept; those that the mark asked for if the hold is refused."""
    ttl_s: float
    refusal: HoldRefusal | None = None
    """None if the hold is granted."""
    reason: str = ""
    """A sentence about the refusal."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate or to pool, in token ids. A client's request with `n > 1` has become several of
    these."""

    request_id: str
    """Unique among the live requests of an engine; also the source of the seed if none is given."""
    prompt: list[int]
    mm_features: list[MultiModalFeatureSpec] = []
    """Images of the prompt, in order of position; they do not overlap."""
    lora: LoRARequest | None = None
    """The adapter with which it is computed; None for the model itself."""
    params: SamplingParams = SamplingParams()
    pooling: PoolingParams | None = None
    """Asks for a vector or a score instead of tokens; `params` then has no effect."""
    reply_to: str = ""
    """ZMQ address of the ingress's token channel; empty for in-process use."""
    client: str = ""
    """Client to whom the compilation of the grammar and the blocks of holds are charged."""
    timeout_s: float | None = None
    """Seconds from arrival after which the engine ends the request; None for no limit."""
    priority: int = 0
    """Smaller runs first; used by the `priority` policy only."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    prediction: list[int] = []
    """Tokens that the client predicts as the output; engines with speculative decoding use them as drafts."""
    kv_source: KVSource | None = None
    """Engine that this request moves from, and that holds the KV of all tokens of `prompt`."""
    kv_holder: KVHolder | None = None
    """Another engine that has more of the prompt cached than the engine that gets this request."""
    prefill: Literal["auto", "local", "remote"] = "auto"
    """Where the prompt is computed. With `remote` the request fails if no other engine can compute it."""
    num_prompt: int | None = None
    """Length of the actual prompt. The tokens of `prompt` after that length are output of another replica: they count
    as output for penalties, min_tokens and max_tokens. None if all tokens are prompt."""
    model: ModelIdentity | None = None
    """Model that must serve the request: replicas of other models refuse it. None allows any."""
    session_id: str = ""
    """Session key: routers send requests of one session to one engine if they can. Engines ignore it."""
    hold: PromptHold | None = None
    """Parts of the prompt that the client wants to stay cached."""
    report_cost: bool = False
    """Whether every delta tells the cost so far, and not only the last one."""
    when_idle: bool = False
    """Whether the request runs only on an idle engine: it is refused, or aborted, if the engine has other work."""

    def continued(self, output: list[int]) -> GenerateRequest:
        """Return the request for another engine, which continues after this output; prompt_logprobs came before it."""
        params = msgspec.structs.replace(self.params, prompt_logprobs=None) if output else self.params
        prompt = [*self.prompt, *output]
        return msgspec.structs.replace(self, prompt=prompt, num_prompt=len(self.prompt), params=params)


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
    (`report_cost`)."""
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


class SpecDecodeStats(msgspec.Struct, kw_only=True):
    """Totals of speculative decoding, named like vLLM's metrics."""

    num_drafts: int = 0
    """Verified drafts: one per sequence and step that verified draft tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted tokens by their position in the draft, from the first position on."""

    def observe(self, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position += [0] * (drafted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1


class HoldStats(msgspec.Struct, frozen=True, kw_only=True):
    """The holds of one engine, and totals since its start."""

    holds: int = 0
    clients: int = 0
    """Clients that have holds."""
    blocks: int = 0
    """Blocks of the first KV cache group that are kept, on the device or in a tier."""
    device_blocks: int = 0
    """Of these, blocks on the device."""
    max_blocks: int | None = None
    """Limit of blocks of this group that holds keep; None with tiers, of which a share is the limit."""
    granted: int = 0
    restored: int = 0
    """Holds of an earlier start that were found on disk or in the store."""
    refused: dict[str, int] = {}
    """Refused holds by HoldRefusal."""
    ended: dict[str, int] = {}
    """Ended holds by HoldEnd."""
    unused_block_s: float = 0.0
    """Blocks of the first KV cache group on the device times the seconds for which holds kept them that no later
    request has used."""


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline stage since its start, while its engine had steps under way."""

    layers: int
    ranks: int
    busy_s: float
    """Seconds in which it computed."""
    wait_s: float
    """Seconds in which it did not: it waited for hidden states, for a step, or for its link."""


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a pipeline stage whose ranks share whole experts."""

    stage: int
    rank_tokens: list[int]
    """Tokens for which each rank has computed an expert since the start, over all layers. The copies of an expert count
    as if they had equal shares."""
    balancedness: float
    """Mean load of a rank divided by the maximum, in the last window: 1 if ranks have equal loads."""
    top: list[tuple[int, int, float]]
    """The most loaded experts of the last window: layer, expert, and its share of the layer's load."""
    moved: int = 0
    """Copies of experts that have moved since the start."""
    stopped: bool = False
    """Whether experts move no more, because a rank failed while it sent or received some."""


class SharedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that an engine has taken together with engines that share its experts, since its start."""

    steps: dict[str, int]
    """Steps by whether they were its `own`, or it only `served` the other engines."""
    wait_s: float
    """Seconds in which it waited for the other engines to begin a step."""
    generation: int = 0
    """Number of engines' losses after which the others went on."""
    engines: int = 0
    """Number of engines that have not been lost, this one included."""
    pause_s: float = 0.0
    """Seconds in which it took no steps because another engine was lost."""


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
    """Numbers of `used`, `cached` and `free` blocks by KV cache group number, and of snapshots of recurrent states
    under `states`; empty with a single group and no states. The fields above are those of the first group."""
    group_block_bytes: dict[str, int] = {}
    """Bytes on one rank of one block of each group in `group_blocks`, and of one snapshot."""
    blocks_reserved: int = 0
    """Blocks held only by requests with KV from another engine, either still coming or waiting for a slot."""
    blocks_leased: int = 0
    """Blocks held only by computed prompts that another engine may still read."""
    moves: dict[str, int] = {}
    """Requests that moved, by outcome: `received` or `failed` in the engine that continues; `released`, `cancelled` or
    `expired` in the engine that has stopped."""
    fetches: dict[str, int] = {}
    """Prompts of which another engine had more cached, by outcome: `received` or `failed` if that KV was fetched, and
    `costs_more` if computing it was expected to be faster."""
    fetched_tokens: int = 0
    """Prompt tokens whose KV was fetched from the prefix caches of other engines."""
    receiving: int = 0
    """Requests whose KV is coming from another engine."""
    leased: int = 0
    """Computed prompts whose blocks another engine may still read."""
    queued_tokens: int = 0
    """Prompt tokens still to be computed."""
    seconds_per_step: float = 0.0
    """Fixed cost of a step, fitted while the engine runs; 0 while unknown."""
    seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    """Fixed cost of a step that only decodes."""
    decode_seconds_per_sequence: float = 0.0
    prompt_seconds_per_token: float = 0.0
    """Cost of a prompt token in seconds: fixed costs included, decodes of the same step excluded."""
    prefill_tokens: int = 0
    """Prompt tokens that this engine computed."""
    prefills: int = 0
    """Prompts that this engine computed to their end."""
    prefill_decisions: dict[str, dict[str, int]] = {}
    """Where prompts were sent to be computed, and why: {"local": {"short_prompt": 3}, "remote": ...}."""
    images_encoded: int = 0
    """Images that the vision encoder has computed."""
    encoder_cache_hits: int = 0
    """Times that a step found the embeddings of an image in the cache."""
    spec_decode: SpecDecodeStats | None = None
    """None without speculative decoding."""
    max_loras: int = 0
    """Slots for adapters; 0 in an engine without adapters."""
    adapters: list[str] = []
    """Digests of the adapters in slots."""
    running_adapters: list[str] = []
    """Names of the adapters of running requests, in order."""
    waiting_adapters: list[str] = []
    kv_offload: KVOffloadStats | None = None
    """None without tiers below the KV cache."""
    holds: HoldStats | None = None
    """None in an engine that keeps no holds."""
    stages: list[StageStats] = []
    """Pipeline stages in order; empty in an engine with one."""
    experts: list[ExpertStats] = []
    """Of each stage, once a window has been measured; empty unless ranks share whole experts."""
    shared: SharedSteps | None = None
    """None in an engine that shares no experts."""
    cost_s: dict[str, float] = {}
    """Seconds since the start, by what they were spent on (CostLine)."""
    kv_gib_s: float = 0.0
    """Gibibytes of KV cache times the seconds for which they were used, on all ranks."""
    histograms: dict[str, Histogram] = {}
    """Histograms by the names that engine/core/stats.py gives them."""

    @property
    def kv_usage(self) -> float:
        """Used fraction of the KV blocks, in the group where it is largest. Snapshots of recurrent states do not count,
        since nearly all of them can be evicted at any time."""
        groups = [blocks for name, blocks in self.group_blocks.items() if name != "states"]
        used = [blocks["used"] / max(1, sum(blocks.values())) for blocks in groups]
        return max([self.blocks_used / self.blocks_total, *used])


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report of an engine to its control actor: requests that ended since the last status, and the engine's state."""

    engine_id: str
    ended: list[str]
    """Ids of the requests that ended, and of the handoffs that it computed for other engines."""
    stats: EngineStats
    last_step_age_s: float
    """Seconds since the last step ended; 0 when there is nothing to compute."""
    handoffs: HandoffStats | None = None
    """None without `EngineConfig.handoff`."""
    image_handoffs: HandoffStats | None = None
    """Handoffs with encode engines; None without `EngineConfig.encode`."""
    live_handoffs: list[HandoffInfo] = []
    """The newest handoffs in flight, at most MAX_LIVE_HANDOFFS of them."""
    fingerprint: str = ""
    """Equal in engines that can hand KV over to each other; empty without `handoff`."""
    encode_fingerprint: str = ""
    """Fingerprint of encode engines that can hand images over to this one; empty without `encode`."""
    refused: dict[str, dict[str, int]] = {}
    """Numbers of messages that its ranks' sockets refused, by socket and reason (engine/distributed/refusals.py)."""
    role: Role | None = None
    """Role of an engine whose role can change; None if its pool says what it does."""
    role_changes: int = 0
    """Changes of the role since its start."""

    def with_pool(self, pool: PeerPool) -> tuple[str, HandoffStats | None]:
        """Return the fingerprint that engines of a pool need in order to compute for this engine, and statistics of the
        handoffs with that pool."""
        return (self.encode_fingerprint, self.image_handoffs) if pool == "encode" else (self.fingerprint, self.handoffs)


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one engine, by which routers and control actors choose. All fields are 0 if nothing is known about the
    engine."""

    sequences: int = 0
    """Sequences that are running, waiting, or waiting for KV; each needs one of `slots` to run."""
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    blocks_used: int = 0
    slots: int = 0
    blocks_total: int = 0
    queued_embeds: int = 0
    """Image embeddings that the vision encoder still has to compute."""
    adapters: tuple[str, ...] = ()
    """Digests of the LoRA adapters in slots."""


class EngineUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Load and KV events of an engine since its previous update, sent to every router that subscribes."""

    engine_id: str
    number: int
    """One more than the number of the previous update, so that a lost update is noticed."""
    snapshot: bool
    """True if `stored` and `admitted` are complete lists, not changes."""
    load: EngineLoad
    stored: bytes
    """Hashes of KV blocks that can be matched from now on, BLOCK_HASH_BYTES each."""
    removed: bytes
    """Hashes of KV blocks that can no longer be matched."""
    admitted: list[str]
    """Requests and remote prefills that arrived; `load` includes them."""
    prefilled: list[tuple[str, int]]
    """Admitted requests whose prompt is computed or that ended, each with its number of cached prompt tokens, or -1 if
    it never ran."""
    peer: Peer | None = None
    """This engine, if others can fetch blocks from it; else None."""
    held: bytes | None = None
    """Hashes of the last blocks of all holds; None if they are those of the update before."""
    draining: bool = False
    """Whether the engine is about to stop."""
    role: Role | None = None
    """As in EngineStatus."""
    window_blocks: int = 0
    """Number of a prefix's last blocks that a request needs to continue after it; 0 if it needs all blocks."""


class DispatchRemote(msgspec.Struct, frozen=True, tag=True):
    """Asks the control actor to send a prompt to a prefill engine (Prefill). The actor answers RemoteRequestFailed if
    none accepts the prompt, or if the call fails earlier."""

    request: RemoteRequest
    pool: PeerPool = "prefill"


class CancelDispatch(msgspec.Struct, frozen=True, tag=True):
    """Tells the control actor that it can cancel the call that a DispatchRemote started."""

    handoff_id: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """Says that a LoadAdapter command has ended."""

    call_id: str
    error: ErrorInfo | None = None
    """Why no request can be computed with the adapter."""


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that an engine has cached, and with which requests begin."""

    token_ids: list[int]
    cache_salt: str
    uses: int
    """Number of requests that began with exactly this cached prefix."""
    num_bytes: int
    """Size of its KV on all ranks."""


class HotPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Answers ListHotPrefixes."""

    call_id: str
    peer: Peer
    prefixes: list[HotPrefix]
    """The most used first."""


class HeldPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that an engine holds for a client, in full blocks. Another engine can take over the hold."""

    token_ids: list[int]
    cache_salt: str
    lora: LoRARequest | None
    client: str
    name: str
    response_id: str
    ttl_s: float
    left_s: float
    """Seconds until the end of the hold."""


class HeldPrompts(msgspec.Struct, frozen=True, tag=True):
    """Answers GiveHolds."""

    call_id: str
    peer: Peer | None
    """The engine itself, if others can fetch blocks from it."""
    prompts: list[HeldPrompt]


class TapeTaken(msgspec.Struct, frozen=True, tag=True):
    """Answers TakeTape."""

    call_id: str
    tape: bytes
    """An EngineTape in msgpack, whose hashes have no key; empty if the engine records none."""


Notice = EngineStatus | DispatchRemote | CancelDispatch | AdapterLoaded | HotPrefixes | HeldPrompts | TapeTaken


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a new request."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request. Unknown ids are ignored, since the request may just have finished."""

    request_id: str
    reason: Literal["abort", "stop"] = "abort"
    """`stop` if the text has reached a stop string, which an engine cannot detect."""


class MoveRequests(msgspec.Struct, frozen=True, tag=True):
    """Let other engines continue up to `count` requests. Each request ends here with the error `moved`."""

    count: int


class GiveHolds(msgspec.Struct, frozen=True, tag=True):
    """Ask for up to `limit` holds that no GiveHolds has returned since their last use, those that last longest first.
    Answered by HeldPrompts. The holds stay here as well."""

    call_id: str
    limit: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Tell all routers to prefer other engines from now on, because this one is about to stop."""


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Take a role, and tell all routers. Requests already in the engine are not affected."""

    role: Role


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Send every EngineUpdate to `address` for the next SUBSCRIPTION_S. The first update is a snapshot, unless this
    address has had one already."""

    address: str
    resync: bool = False
    """Whether to send a snapshot in any case, because an update was lost."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt for another engine. `EngineStatus.ended` names the handoff once it has ended, for any reason."""

    request: RemoteRequest


class CancelPrefill(msgspec.Struct, frozen=True, tag=True):
    """Stop computing another engine's prompt, because the call that delivered the prompt has ended."""

    handoff_id: str


class RemoteRequestFailed(msgspec.Struct, frozen=True, tag=True):
    """Says that no prefill engine has accepted a prefill request. retry: whether another attempt can succeed."""

    handoff_id: str
    reason: str
    retry: bool


class PrefillReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Load and speed of one engine that computes prompts, from its newest EngineStats."""

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
    """The prefill engines, or encode engines, that are alive; sent about once a second."""

    replicas: list[PrefillReplica]
    pool: PeerPool = "prefill"


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Check that an adapter fits the model, and read its weights into host memory on every rank. Answered by
    AdapterLoaded."""

    call_id: str
    lora: LoRARequest


class ListHotPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Ask for the most used cached prefixes, at most `limit` of them. Answered by HotPrefixes, unless other engines
    cannot fetch from this one."""

    call_id: str
    limit: int


class TakeTape(msgspec.Struct, frozen=True, tag=True):
    """Ask for the tape (core/tape/). Answered by TapeTaken."""

    call_id: str


class ReleaseHolds(msgspec.Struct, frozen=True, tag=True):
    """End the holds that have this name, or are of the response with this id."""

    name: str
    client: str | None = None
    """Client whose holds end; None for those of all clients."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache, so that prompts are computed anew."""


Command = (
    Add
    | Abort
    | MoveRequests
    | GiveHolds
    | Drain
    | SetRole
    | Subscribe
    | ReleaseHolds
    | ResetPrefixCache
    | LoadAdapter
    | ListHotPrefixes
    | TakeTape
    | Prefill
    | CancelPrefill
    | RemoteRequestFailed
    | PrefillReplicas
)

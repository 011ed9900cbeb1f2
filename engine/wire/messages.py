"""Messages between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      Add, Abort, MoveRequests, GiveHolds, Drain, Subscribe, ResetPrefixCache, ReleaseHolds, LoadAdapter,
                    TakeTape;
                    Prefill, CancelPrefill (to an engine that computes prompts for others);
                    RemoteRequestFailed, PrefillReplicas (to an engine whose prompts others compute)    (`Command`)
From the engine:    TokenBatch (token_delta.py) to each ingress that has requests there, one per step;
                    EngineUpdate to each router that subscribes;
                    to the replica's control actor (`Notice`) EngineStatus, at least once a second, AdapterLoaded,
                    HeldPrompts, TapeTaken, and from an engine whose prompts others compute DispatchRemote and
                    CancelDispatch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.wire.generate_request import GenerateRequest
from engine.wire.lora import LoRARequest
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.stats.engine_stats import EngineLoad, EngineStats
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats, Role
from engine.wire.token_delta import ErrorInfo

PeerPool = Literal["prefill", "encode"]  # of engines that compute for others
MAX_LIVE_HANDOFFS = 200  # in one EngineStatus
SUBSCRIPTION_S = 30.0


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
    """Ask for the tape (parts/tape/). Answered by TapeTaken."""

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

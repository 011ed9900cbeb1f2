"""Messages between an engine and the processes that use it (msgspec over ZMQ).

To the engine:      `Command`s
From the engine:    TokenBatch (token_delta.py) to each ingress that has requests there, one per step;
                    EngineUpdate to each router that subscribes;
                    `Notice`s to the replica's control actor, EngineStatus at least once a second.
"""

from __future__ import annotations

from typing import Any, Literal, Self, Union

import msgspec

from engine.wire.generate_request import GenerateRequest
from engine.wire.remote_request import Peer
from engine.wire.stats.engine_stats import EngineLoad, EngineStats
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats, PeerPool, Role

MAX_LIVE_HANDOFFS = 200  # in one EngineStatus
SUBSCRIPTION_S = 30.0


class Command(msgspec.Struct, frozen=True, tag=True):
    """What an engine is told. Those that only a feature understands are in wire/parts/."""


class Notice(msgspec.Struct, frozen=True, tag=True):
    """What an engine tells its replica's control actor. Those of features are in wire/parts/."""


class Question(Command, frozen=True, kw_only=True):
    """A command that an engine answers by one Answer."""

    call_id: str = ""
    """Set by the control actor that asks."""


class Answer(Notice, frozen=True):
    """The answer to a Question."""

    call_id: str
    answer: bytes
    """In msgpack. The question says what it is, so that a control actor passes on answers that it does not know."""

    @classmethod
    def to(cls, question: Question, answer: Any) -> Self:
        return cls(question.call_id, msgspec.msgpack.encode(answer))


def kinds_of(base: type[msgspec.Struct]) -> Any:
    """Return the union of all messages of a kind that this process has imported, for decoders."""
    kinds = [kind for kind in base.__subclasses__() if kind is not Question]
    asked = Question.__subclasses__() if base is Command else []
    return Union[(*kinds, *asked)]


class EngineStatus(Notice, frozen=True, kw_only=True):
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


class Add(Command, frozen=True):
    """Take a new request."""

    request: GenerateRequest


class Abort(Command, frozen=True):
    """End a request. Unknown ids are ignored, since the request may just have finished."""

    request_id: str
    reason: Literal["abort", "stop"] = "abort"
    """`stop` if the text has reached a stop string, which an engine cannot detect."""


class Drain(Command, frozen=True):
    """Tell all routers to prefer other engines from now on, because this one is about to stop."""


class Subscribe(Command, frozen=True):
    """Send every EngineUpdate to `address` for the next SUBSCRIPTION_S. The first update is a snapshot, unless this
    address has had one already."""

    address: str
    resync: bool = False
    """Whether to send a snapshot in any case, because an update was lost."""


class ResetPrefixCache(Command, frozen=True):
    """Empty the prefix cache, so that prompts are computed anew."""

"""Handoff actions of the step loop, and events that the handoff channel returns.

`HandoffChannel.submit` takes an action, and `HandoffProtocol.apply` carries it out. An action on a handoff that has
ended is ignored: its final event is on the way. Exactly one Received or Failed follows every OpenHandoff, and exactly
one Closed every AcceptPrefill and HoldRequest. Until then the handoff's blocks must not be used for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.wire.parts.handoffs import RemoteRequestFailed
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.timeline import TimelineEvent
from engine.wire.token_delta import TokenLogprob


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The token that prefill sampled after the prompt, with what decode needs to know about the prompt."""

    token: int
    logprob: TokenLogprob | None
    prompt_hash: bytes  #: hash of the prompt's last block, full or not; it covers all tokens of the prompt
    cached: int  #: prompt tokens that prefill had in its cache
    timeline: list[TimelineEvent] = []  #: events of the prompt in the prefill engine
    engine_id: str = ""  #: of the engine that had the KV
    numerics: str = ""  #: equal for engines whose KV has the same bits; empty if its bits depend on the batch


class PromptCost(msgspec.Struct, frozen=True, array_like=True):
    """What the prefill engine has spent on a prompt so far."""

    compute_ns: int = 0  #: the prompt's share of steps
    byte_ns: float = 0.0  #: bytes of KV cache times nanoseconds


NO_COST = PromptCost()

NO_TOKEN = -1
"""Placeholder for the token after fetched KV: the engine that fetches computes this token itself."""


# -- actions of decode -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """Prepares for the KV of a prompt, before the request for it is sent.

    Nothing else may touch the blocks until Received or Failed.
    """

    remote_request: RemoteRequest
    blocks: list[int]
    """Local blocks of the first KV cache group, for the request's tokens from `skip` on. A group with a window has
    fewer: only those that tokens after the prompt attend to."""
    others: list[list[int]] = field(default_factory=list)
    """Local blocks of each further group, likewise."""
    source: Peer | None = None
    """Engine that holds a request that moves, or blocks to fetch, and is asked for the KV; None if another will answer
    a prefill request."""
    names: list[bytes] = field(default_factory=list)
    """Names of the blocks to fetch: for each KV cache group the hashes of its blocks, one after the other. Empty unless
    the KV is fetched from the prefix cache of `source`."""


@dataclass(frozen=True, slots=True)
class CancelHandoff:
    """Cancels the handoff of a prompt whose KV is no longer needed.

    Failed follows once nothing is being read, with the reason `cancelled` unless the handoff had failed already. If all
    KV had arrived already, Received follows instead.
    """

    handoff_id: str
    paid_ns: int = 0  #: what the client pays of PromptCost.compute_ns


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Reads nothing any more from an engine, whose KV was wrong, until this engine ends. Handoffs from there fail."""

    engine_id: str


# -- actions of prefill ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptPrefill:
    """Accepts a prefill request, once.

    Closed follows, at the latest one lease after decode's last sign of life. If the prompt is still being computed by
    then, nobody needs its KV any more.
    """

    remote_request: RemoteRequest


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Reports that the KV of all tokens from `skip` up to `upto` is complete. It is kept until Closed.

    Reports are cumulative: each repeats the blocks of earlier reports. Every report names blocks of the first KV cache
    group; the last report also names those of the other groups, as in OpenHandoff.
    """

    handoff_id: str
    upto: int
    blocks: list[int]
    cost: PromptCost = NO_COST
    num_bytes: float = 0.0
    """Bytes of KV cache that the prompt uses from `at_ns` on; of a shared block, its share."""
    at_ns: int = 0


@dataclass(frozen=True, slots=True)
class FinishPrefill:
    """Reports that the whole prompt is computed, after ReportProgress has named all of its blocks."""

    handoff_id: str
    first: FirstToken


@dataclass(frozen=True, slots=True)
class RefusePrefill:
    """Refuses to compute a prompt. If it was accepted before, Closed still follows, because decode may be reading."""

    remote_request: RemoteRequest
    reason: str


# -- actions of an engine from which a request moves -------------------------------------------------------


class HeldBlocks(NamedTuple):
    """Blocks of one KV cache group that a held request hands over."""

    first: int  #: index of the first of them in the sequence, in blocks
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Keeps the KV of a request that has stopped, for the first engine that claims it.

    Closed follows at the latest one lease after the last sign of life of the claiming engine, or one lease after this
    action if no engine claims the KV.
    """

    remote_request: RemoteRequest  #: its tokens all have KV; `decode` is NOBODY, and `skip` is 0
    groups: list[HeldBlocks]
    first: FirstToken  #: the token that was sampled last, which no client has seen


# -- actions of an engine whose cached blocks others fetch -------------------------------------------------


@dataclass(frozen=True, slots=True)
class HoldBlocks:
    """Keeps cached blocks for the engine that has asked for them. Answers BlocksAsked, unless RefusePrefill does.

    Closed follows at the latest one lease after that engine's last sign of life.
    """

    remote_request: RemoteRequest  #: as in BlocksAsked
    upto: int  #: number of tokens up to whose end it holds the KV
    blocks: list[int]  #: the blocks of these names, in order; those of all groups, one group after the other
    first: FirstToken  #: without a token (NO_TOKEN); its `cached` is `upto`


# -- actions of both -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends all handoffs of an engine that is about to stop."""


HandoffAction = (
    OpenHandoff
    | CancelHandoff
    | Quarantine
    | RemoteRequestFailed
    | AcceptPrefill
    | ReportProgress
    | FinishPrefill
    | RefusePrefill
    | HoldRequest
    | HoldBlocks
    | Leave
)


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """Decode: the KV of the whole prompt is in the reserved blocks and verified."""

    handoff_id: str
    first: FirstToken
    byte_ns: float = 0.0  #: PromptCost.byte_ns until decode has read the KV


@dataclass(frozen=True, slots=True)
class Failed:
    """Decode: the handoff failed. Nothing writes to the reserved blocks any more."""

    handoff_id: str
    reason: str  #: a key of FAILURES (decode_side.py), for metrics
    verified: int  #: leading tokens whose KV is correct, skipped ones included, in whole blocks
    retry: bool  #: whether another prefill engine may succeed
    detail: str = ""  #: human-readable explanation


@dataclass(frozen=True, slots=True)
class Closed:
    """Prefill: nothing reads the blocks any more."""

    handoff_id: str
    reason: str  #: `released`, `cancelled` or `expired`
    paid_ns: int = 0  #: as in CancelHandoff


@dataclass(frozen=True, slots=True)
class Spent:
    """Decode: what the prefill engine has spent on a prompt so far."""

    handoff_id: str
    cost: PromptCost


@dataclass(frozen=True, slots=True)
class Noted:
    """Decode: a timeline event of the request whose prompt is handed over."""

    request_id: str
    what: TimelineEvent


@dataclass(frozen=True, slots=True)
class BlocksAsked:
    """Another engine asks for blocks in the prefix cache. HoldBlocks or RefusePrefill must follow."""

    remote_request: RemoteRequest  #: without tokens, which names do not tell
    upto: int  #: number of tokens up to whose end the blocks have the KV
    names: list[bytes]  #: as in OpenHandoff

    @property
    def handoff_id(self) -> str:
        return self.remote_request.handoff_id


HandoffEvent = Received | Failed | Closed | Spent | Noted | BlocksAsked

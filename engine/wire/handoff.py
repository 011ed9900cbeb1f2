"""Actions of the step loop on handoffs, and events that come back from the handoff channel.

`HandoffChannel.submit` takes an action, `HandoffProtocol.apply` carries it out. One for a handoff that is over is
ignored: its event is on the way. Exactly one Received or Failed follows every OpenHandoff, and exactly one Closed every
AcceptPrefill. Until then the blocks of the handoff must not be used for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.wire.messages import RemoteRequestFailed, TokenLogprob
from engine.wire.remote_request import RemoteRequest
from engine.wire.timeline import TimelineEvent


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The token that prefill sampled after the prompt, and what decode has to know of the prompt."""

    token: int
    logprob: TokenLogprob | None
    prompt_hash: bytes  #: hash of the prompt's last block, full or not, which stands for all tokens up to it
    cached: int  #: prompt tokens that prefill had in its cache
    timeline: list[TimelineEvent] = []  #: what happened to the prompt there


# -- actions of decode -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """Expect the KV of a prompt, before the request for it is sent.

    Nothing else may touch the blocks until Received or Failed.
    """

    remote_request: RemoteRequest
    blocks: list[int]
    """Local blocks for the KV of the request's tokens from `skip` on, in the first KV cache group; fewer where it has a
    window, for what the tokens after the prompt see of it."""
    others: list[list[int]] = field(default_factory=list)
    """Those of each further group."""


@dataclass(frozen=True, slots=True)
class CancelHandoff:
    """Give up a prompt that is not wanted any more.

    Failed follows once nothing is being read (reason `cancelled`, if it had not failed already), or Received, if that
    was on the way.
    """

    handoff_id: str


# -- actions of prefill ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptPrefill:
    """Take a prefill request, once.

    Closed follows, at the latest one lease after decode's last sign of life. If the prompt is still being computed
    then, its KV is not wanted any more.
    """

    remote_request: RemoteRequest


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """The KV of all tokens from `skip` up to `upto` is complete, and stays until Closed.

    Cumulative: later reports repeat the blocks of earlier ones. Those before the last one are of the first KV cache
    group; in the last one those of the other groups follow, as in OpenHandoff.
    """

    handoff_id: str
    upto: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class FinishPrefill:
    """The whole prompt is computed, and ReportProgress has named all of its blocks."""

    handoff_id: str
    first: FirstToken


@dataclass(frozen=True, slots=True)
class RefusePrefill:
    """The prompt will not be computed. If it was accepted, Closed still follows, as decode may be reading."""

    remote_request: RemoteRequest
    reason: str


# -- actions of both -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave:
    """End all handoffs, since this engine is about to end."""


HandoffAction = (
    OpenHandoff
    | CancelHandoff
    | RemoteRequestFailed
    | AcceptPrefill
    | ReportProgress
    | FinishPrefill
    | RefusePrefill
    | Leave
)


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """Decode: the KV of the whole prompt is in the reserved blocks, and correct."""

    handoff_id: str
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Failed:
    """Decode: the handoff failed, and nothing writes into the reserved blocks any more."""

    handoff_id: str
    reason: str  #: a key of FAILURES (decode_side.py), for metrics
    verified: int  #: leading tokens, in whole blocks and with those skipped, whose KV is correct
    retry: bool  #: another prefill engine may succeed
    detail: str = ""  #: for people


@dataclass(frozen=True, slots=True)
class Closed:
    """Prefill: the blocks are not read any more."""

    handoff_id: str
    reason: str  #: `released`, `cancelled` or `expired`


@dataclass(frozen=True, slots=True)
class Noted:
    """Decode: an event for the timeline of the request whose prompt is handed over."""

    request_id: str
    what: TimelineEvent


HandoffEvent = Received | Failed | Closed | Noted

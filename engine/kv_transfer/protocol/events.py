"""Events from the handoff channel to the step loop.

Exactly one Received or Failed follows every OpenHandoff, and exactly one Closed every AcceptPrefill. Until then the
blocks of the handoff must not be used for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_transfer.protocol.messages import FirstToken
from engine.wire.timeline import TimelineEvent


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
    """Prefill: nobody reads the blocks any more."""

    handoff_id: str
    reason: str  #: `released`, `cancelled` or `expired`


@dataclass(frozen=True, slots=True)
class Noted:
    """Decode: an event for the timeline of the request whose prompt is handed over."""

    request_id: str
    what: TimelineEvent


HandoffEvent = Received | Failed | Closed | Noted

"""What the handoff channel tells the step loop. Exactly one Received or Failed follows every `open`, and exactly one
Closed every `accept`: until then the handoff's blocks must not be used for anything else."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_transfer.protocol.messages import FirstToken
from engine.wire.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class Received:
    """Decode: all KV of the prompt lies in the reserved blocks, and is right."""

    handoff_id: str
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Failed:
    """Decode: nothing writes into the reserved blocks any more. verified: leading tokens of the prompt, in whole blocks
    and including those skipped, whose KV there is right. retry: another prefill engine may do better.
    reason: one of a few words, for metrics (see FAILURES in decode_side.py). detail: for people."""

    handoff_id: str
    reason: str
    verified: int
    retry: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """Prefill: nobody reads the blocks any more. reason: `released`, `cancelled` or `expired`."""

    handoff_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Decode: something for the timeline of the request whose prompt is handed over."""

    request_id: str
    what: TimelineEvent


HandoffEvent = Received | Failed | Closed | Noted

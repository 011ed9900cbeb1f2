"""Handoffs of one engine, besides those of its channel (wire/stats/handoff_stats.py)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.messages import Command, EngineStatus, Notice
from engine.wire.part_record import PartRecord
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import PeerPool, Role


class HandoffTotals(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "handoffs"

    prefill_decisions: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """Where prompts were sent to be computed, and why: {"local": {"short_prompt": 3}, "remote": ...}."""
    moves: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that moved, by outcome: `received` or `failed` in the engine that continues; `released`, `cancelled` or
    `expired` in the engine that has stopped."""


class HandoffTimes(PartRecord, frozen=True):
    """Start and end of an attempt to let another engine compute the prompt, in seconds since the request's arrival;
    told with its first token. The last attempt counts."""

    part: ClassVar[str] = "handoffs"

    start_s: float
    end_s: float


class DispatchRemote(Notice, frozen=True):
    """Asks the control actor to send a prompt to a prefill engine (Prefill). The actor answers RemoteRequestFailed if
    none accepts the prompt, or if the call fails earlier."""

    request: RemoteRequest
    pool: PeerPool = "prefill"


class CancelDispatch(Notice, frozen=True):
    """Tells the control actor that it can cancel the call that a DispatchRemote started."""

    handoff_id: str


class MoveRequests(Command, frozen=True):
    """Let other engines continue up to `count` requests. Each request ends here with the error `moved`."""

    count: int


class SetRole(Command, frozen=True):
    """Take a role, and tell all routers. Requests already in the engine are not affected."""

    role: Role


class Prefill(Command, frozen=True):
    """Compute a prompt for another engine. `EngineStatus.ended` names the handoff once it has ended, for any reason."""

    request: RemoteRequest


class CancelPrefill(Command, frozen=True):
    """Stop computing another engine's prompt, because the call that delivered the prompt has ended."""

    handoff_id: str


class RemoteRequestFailed(Command, frozen=True):
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


class PrefillReplicas(Command, frozen=True):
    """The prefill engines, or encode engines, that are alive; sent about once a second."""

    replicas: list[PrefillReplica]
    pool: PeerPool = "prefill"

"""Reports of replicas and ingresses to the autoscaling policy. They are numbers by name, because Serve transports only
this form.

Serve collects them once a second, and keeps those of the last few seconds. The policy reads the reports in Serve's
controller, which should not load an engine's modules: this file imports those for type checking only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import msgspec

from deployments.routing.config import Role
from engine.wire.parts.handoffs import HandoffTotals

if TYPE_CHECKING:
    from engine.wire.messages import EngineStatus

SPILLS = (
    "saturated",
    "no_prefill_replica",
    "quarantined",
)  # reasons of RemotePrefillPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Current state of one engine, and totals since its start (`_total`)."""

    running: float  #: sequences that hold KV
    receiving: float  #: those of them whose prompts are computed by other engines
    waiting: float  #: sequences that hold none
    queued_tokens: float  #: prompt tokens still to be computed here
    blocks_used: float
    blocks_total: float
    prefill_tokens_total: float  #: prompt tokens computed here
    prefills_total: float  #: prompts computed here
    cached_tokens_total: float  #: prompt tokens found in the prefix cache
    local_total: float  #: prompts that this decode engine computed itself
    spilled_total: float  #: those of them that no prefill replica could take
    output_tokens_total: float
    itl_s_total: float  #: sum of the inter-token latencies, in seconds
    itl_total: float  #: number of latencies in that sum
    decode_step_s: float  #: see EngineStats.decode_seconds_per_step
    decode_sequence_s: float  #: see EngineStats.decode_seconds_per_sequence
    token_s: float  #: see EngineStats.prompt_seconds_per_token
    prefill_role: float = 0.0  #: 1 for an engine whose role may change, and which computes prompts for others now

    @classmethod
    def of(cls, status: EngineStatus) -> ReplicaReport:
        stats = status.stats
        itl = stats.histograms["inter_token_latency_seconds"]
        handoffs = stats.record(HandoffTotals) or HandoffTotals()
        local = handoffs.prefill_decisions.get("local", {})
        return cls(
            running=stats.running + stats.receiving + stats.leased,
            receiving=stats.receiving,
            waiting=stats.waiting,
            queued_tokens=stats.queued_tokens,
            blocks_used=stats.blocks_used,
            blocks_total=stats.blocks_total,
            prefill_tokens_total=stats.prefill_tokens,
            prefills_total=stats.prefills,
            cached_tokens_total=stats.prefix_hit_tokens,
            local_total=sum(local.values()),
            spilled_total=sum(local.get(reason, 0) for reason in SPILLS),
            output_tokens_total=stats.generation_tokens,
            itl_s_total=itl.sum,
            itl_total=itl.count,
            decode_step_s=stats.decode_seconds_per_step,
            decode_sequence_s=stats.decode_seconds_per_sequence,
            token_s=stats.prompt_seconds_per_token,
            prefill_role=float(status.role == "prefill"),
        )

    @classmethod
    def of_all(cls, statuses: Sequence[EngineStatus]) -> ReplicaReport:
        """Return the report of a replica with several engines, which compute at the same time."""
        reports = [cls.of(status) for status in statuses]
        count = len(reports)
        sums = {field.name: sum(getattr(report, field.name) for report in reports) for field in fields(cls)}
        return replace(
            cls(**sums),
            decode_step_s=sums["decode_step_s"] / count,
            decode_sequence_s=sums["decode_sequence_s"] / count**2,  # each has a part of the sequences
            token_s=sums["token_s"] / count**2,
            prefill_role=sums["prefill_role"] / count,
        )

    def numbers(self) -> dict[str, float]:
        return asdict(self)


DEFAULTS: dict[str, float] = {each.name: each.default for each in fields(ReplicaReport) if each.default is not MISSING}
"""Values of the numbers that replicas of an earlier version may not report."""


class ScalingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a pool's number of replicas."""

    at: float  #: seconds since 1970
    model: str
    pool: Role
    before: int
    after: int
    reason: str  #: see ScalingDecision.reason
    desired: int  #: replicas that the load requires, before delays and bounds
    inputs: dict[str, float]  #: figures on which the decision rests
    cost_per_hour: float = 0.0  #: of the pool's replicas from now on, by `prices.engine_hour`; 0 without prices
    saved_per_hour: float = 0.0  #: by this change; negative if it costs more


def queue_report(model: str, waiting: float, waiting_tokens: float) -> dict[str, float]:
    """Return a report of the admission queue of one model in one ingress: its sequences, and their prompt tokens."""
    return {waiting_of(model): waiting, waiting_tokens_of(model): waiting_tokens}


def waiting_of(model: str) -> str:
    return f"waiting/{model}"


def waiting_tokens_of(model: str) -> str:
    return f"waiting_tokens/{model}"

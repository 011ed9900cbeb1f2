"""What replicas and ingresses tell the autoscaling policy, as numbers by name: that is what Serve carries.

Serve collects them once a second, keeps the last seconds, and the policy reads them in Serve's controller. That has no
use for an engine's modules, so they are imported for their types only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.frontend.admission import Admission
    from engine.wire.messages import EngineStatus

SPILLS = ("saturated", "no_prefill_replica", "quarantined")  # reasons of engine/core/remote_prefill_policy.py


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Of one engine, now. Totals since its start end in _total.

    running: sequences that hold KV. waiting: that do not. queued_tokens: prompt tokens still to be computed here.
    prefill_tokens_total, prefills_total: computed here. cached_tokens_total: that the prefix cache spared.
    local_total: prompts that were given to this engine to compute; spilled_total: of those, because no prefill replica
    could.
    itl_s_total, itl_total: times between tokens, and how many.
    decode_step_s, decode_sequence_s, token_s: what steps cost, see EngineStats.
    """

    running: float
    waiting: float
    queued_tokens: float
    blocks_used: float
    blocks_total: float
    prefill_tokens_total: float
    prefills_total: float
    cached_tokens_total: float
    local_total: float
    spilled_total: float
    output_tokens_total: float
    itl_s_total: float
    itl_total: float
    decode_step_s: float
    decode_sequence_s: float
    token_s: float

    @classmethod
    def of(cls, status: EngineStatus) -> ReplicaReport:
        stats = status.stats
        itl = stats.histograms["inter_token_latency_seconds"]
        local = stats.prefill_decisions.get("local", {})
        return cls(
            running=stats.running + stats.receiving + stats.leased,
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
        )

    def numbers(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class QueueReport:
    """Of one model in one ingress: sequences that wait there for the engines, and tokens of their prompts."""

    waiting: float
    waiting_tokens: float

    @classmethod
    def of(cls, admission: Admission) -> QueueReport:
        return cls(admission.num_waiting, admission.waiting_tokens)

    def numbers(self, model: str) -> dict[str, float]:
        return {waiting_of(model): self.waiting, waiting_tokens_of(model): self.waiting_tokens}


def waiting_of(model: str) -> str:
    return f"waiting/{model}"


def waiting_tokens_of(model: str) -> str:
    return f"waiting_tokens/{model}"

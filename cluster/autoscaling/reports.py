"""From what replicas and ingresses report to what the policy sees. Knows Serve's context, but no Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.autoscaling.load import EngineCosts, PoolLoad, ReplicaLoad
from deployments.observability.scaling_report import waiting_of, waiting_tokens_of

MIN_WINDOW_S = 0.5  # between two reports, for rates


class Point(Protocol):
    timestamp: float
    value: float


Reports = Mapping[str, Mapping[object, Sequence[Point]]]  # by name, by replica: the last few seconds, oldest first


class Context(Protocol):
    """The part of Serve's AutoscalingContext that is of use here."""

    @property
    def current_num_replicas(self) -> int: ...

    @property
    def raw_metrics(self) -> Reports: ...

    @property
    def total_queued_requests(self) -> float: ...


def pool_load(context: Context, waiting: int = 0, waiting_tokens: int = 0) -> PoolLoad:
    """waiting, waiting_tokens: sequences in front of the pool, and tokens of their prompts."""
    reports = context.raw_metrics or {}
    replicas = [replica for replica, points in reports.get("running", {}).items() if points]
    return PoolLoad(
        running_replicas=context.current_num_replicas,
        replicas=[_replica_load(reports, replica) for replica in replicas],
        waiting=waiting + math.ceil(context.total_queued_requests or 0),
        waiting_tokens=waiting_tokens,
    )


def queue_of(context: Context, model: str) -> tuple[int, int]:
    """Sequences that wait in all ingresses, and tokens of their prompts. context: of the ingress deployment."""
    reports = context.raw_metrics or {}
    waiting, tokens = (
        sum(int(points[-1].value) for points in reports.get(name, {}).values() if points)
        for name in (waiting_of(model), waiting_tokens_of(model))
    )
    return waiting, tokens


def _replica_load(reports: Reports, replica: object) -> ReplicaLoad:
    def last(name: str) -> float:
        return reports[name][replica][-1].value

    def risen(name: str) -> float:
        """Of a total, within what Serve has kept."""
        points = reports[name][replica]
        return max(0.0, points[-1].value - points[0].value)

    points = reports["running"][replica]
    window_s = max(points[-1].timestamp - points[0].timestamp, MIN_WINDOW_S)
    return ReplicaLoad(
        running=int(last("running")),
        waiting=int(last("waiting")),
        queued_tokens=int(last("queued_tokens")),
        prefill_tokens_per_s=risen("prefill_tokens_total") / window_s,
        cached_tokens_per_s=risen("cached_tokens_total") / window_s,
        prefills_per_s=risen("prefills_total") / window_s,
        spilled_fraction=risen("spilled_total") / max(1.0, risen("local_total")),
        output_tokens_per_s=risen("output_tokens_total") / window_s,
        itl_s=risen("itl_s_total") / max(1.0, risen("itl_total")),
        blocks_used=int(last("blocks_used")),
        blocks_total=int(last("blocks_total")),
        costs=EngineCosts(
            decode_step_s=last("decode_step_s"),
            decode_sequence_s=last("decode_sequence_s"),
            token_s=last("token_s"),
        ),
    )

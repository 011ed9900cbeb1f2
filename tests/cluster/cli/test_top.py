"""`manta top`: what it prints of two states."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from cluster.cli.top import view
from deployments.observability.timeline import SequenceTimeline
from deployments.parts.console.cluster_watcher import ClusterEvent, ClusterState
from deployments.replicas.pools import ModelReplicas, ReplicaStatus
from deployments.replicas.scaling_report import ScalingChange
from engine.wire.messages import EngineStatus
from engine.wire.part_record import encoded
from engine.wire.parts.experts import ExpertReport, ExpertStats
from tests.engine_stats import engine_stats


def state(at: float, tokens: int, *, asleep: bool = False) -> ClusterState:
    stats = engine_stats(
        running=3,
        generation_tokens=tokens,
        blocks_used=5,
        blocks_cached=2,
        prefix_queried_tokens=8,
        prefix_hit_tokens=2,
    )
    status = ReplicaStatus.of(EngineStatus(engine_id="decode-m-a1", ended=[], stats=stats, last_step_age_s=0.0), {})
    change = ScalingChange(
        at=3.0, model="m", pool="decode", before=1, after=2, reason="itl", desired=2, inputs={}, cost_per_hour=8.4,
        saved_per_hour=-4.2,
    )  # fmt: skip
    return ClusterState(
        at=at,
        models=[ModelReplicas("m", [] if asleep else [status], [], [], asleep)],
        waiting={"m": 7},
        requests=[SequenceTimeline(request_id="[bold]r[/bold]", model="m", prompt_tokens=9, arrived_at=0.0, replays=1)],
        events=[ClusterEvent(2.0, "gone", "m", "decode-m-b2")],
        scaling=[change],
    )


def printed(now: ClusterState, before: ClusterState | None, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view(now, before))
    return out.getvalue()


def test_replicas_requests_and_events_are_shown_with_rates_between_two_looks():
    text = printed(state(12.0, 300), state(10.0, 100))
    assert "7 wait for admission" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("decode-m-a1")]
    assert row == ["decode-m-a1", "3", "0", "100", "0", "50%", "20%", "25%"]
    assert "[bold]r[/bold]" in text
    assert "waiting, 1 replay " in text
    assert text.index("decode-m from 1 to 2 replicas: itl, 8.40 per hour (4.20 more)") < text.index("gone decode-m-b2")


def test_a_narrow_terminal_continues_names_in_the_next_line_and_cuts_nothing():
    now = state(12.0, 300)
    replica, request = "decode-Mistral-Small-3.1-24B-1f0c9a", f"chatcmpl-{'0123456789abcdef' * 2}"
    now.models[0].decode[0] = msgspec.structs.replace(now.models[0].decode[0], engine_id=replica)
    now.requests[0] = msgspec.structs.replace(now.requests[0], request_id=request, model="Mistral-Small-3.1-24B")
    text = printed(now, state(10.0, 100), width=80)
    assert "…" not in text
    replicas, requests = text.split("request", 1)
    for name, table in ((replica, replicas), (request, requests), ("Mistral-Small-3.1-24B", requests)):
        rows = [line for line in table.splitlines() if line]
        starts = next(row.index(name[:8]) for row in rows if name[:8] in row)
        assert name in "".join(row[starts:].split(" ")[0] for row in rows)


def test_ranks_that_share_experts_are_shown_with_their_load_and_the_hottest_expert():
    now = state(12.0, 300)
    experts = [
        ExpertStats(stage=0, rank_tokens=[75, 25], balancedness=2 / 3, top=[(3, 7, 0.5), (1, 2, 0.25)], moved=4),
        ExpertStats(stage=1, rank_tokens=[0, 0], balancedness=1.0, top=[]),
    ]
    replica = now.models[0].decode[0]
    stats = msgspec.structs.replace(replica.stats, parts=encoded(ExpertReport(experts)))
    now.models[0].decode[0] = msgspec.structs.replace(replica, stats=stats)
    text = printed(now, None)
    assert "experts of decode-m-a1: balanced 67%, load of ranks 75% 25%, layer 3 expert 7 has 50%, 4 moved" in text
    assert "experts of decode-m-a1 stage 1: balanced 100%, load of ranks 0% 0%, 0 moved" in text
    assert "experts of" not in printed(state(12.0, 300), None)


def test_without_a_look_before_there_are_no_rates_and_a_model_may_be_asleep():
    assert "100" not in printed(state(12.0, 300), None)
    assert "m is asleep" in printed(state(12.0, 0, asleep=True), None)

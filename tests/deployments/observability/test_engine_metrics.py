"""What /metrics and /debug/handoffs show of handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from prometheus_client.core import Metric

from deployments.http.debug import live_handoffs
from deployments.observability.engine_metrics import handoff_metrics, part_metrics
from deployments.parts.experts.metrics import METRICS as experts
from deployments.parts.handoffs.metrics import METRICS as handoffs
from deployments.parts.prediction.metrics import METRICS as speculation
from deployments.parts.stages.metrics import METRICS as stages
from deployments.replicas.pools import ReplicaStatus
from engine.errors import EngineUnavailable
from engine.parts.speculation.draft_totals import DraftTotals
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import EngineStatus
from engine.wire.part_record import encoded
from engine.wire.parts.experts import ExpertReport, ExpertStats, SharedSteps
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.parts.stages import StageReport, StageStats
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats, PeerPool
from tests.deployments.replicas.fake_prefill import status

STATS = HandoffStats(
    live=2,
    results={"received": {"": 7}, "failed": {"silent": 1}},
    phase_seconds={"compute": (7, 3.5)},
    bytes_read={"tcp": 300, "nixl": 100},
    bytes_overlapped=100,
    lease_expiries=1,
    quarantined=["prefill-m-2"],
)


def series(*statuses: EngineStatus) -> dict[tuple[str, ...], float]:
    """The values of series by name and labels, without model and engine."""
    engines = [(["m", status.engine_id], status) for status in statuses]
    metrics: list[Metric] = [*handoff_metrics(engines), *part_metrics((*stages, *experts), [], engines)]
    return {
        (sample.name, *[v for k, v in sample.labels.items() if k not in ("model_name", "engine")]): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_handoffs_are_counted_by_result_phase_and_transport():
    found = series(msgspec.structs.replace(status("decode-m-1"), handoffs=STATS))
    assert found["manta_handoffs_total", "prefill", "received", ""] == 7
    assert found["manta_handoffs_total", "prefill", "failed", "silent"] == 1
    assert found["manta_handoff_phase_seconds_sum", "prefill", "compute"] == 3.5
    assert found["manta_handoff_phase_seconds_count", "prefill", "compute"] == 7
    assert found["manta_handoff_bytes_total", "prefill", "nixl"] == 100
    assert found["manta_handoff_overlap_ratio", "prefill"] == 0.25
    assert found["manta_handoff_lease_expiries_total", "prefill"] == 1
    assert found["manta_handoffs_live", "prefill"] == 2
    assert found["manta_handoff_resting_peers", "prefill"] == 1


def test_handoffs_of_images_are_told_apart_by_the_pool_on_both_sides():
    decode = msgspec.structs.replace(status("decode-m-1"), handoffs=STATS, image_handoffs=HandoffStats(live=3))
    encode = msgspec.structs.replace(status("encode-m-1"), handoffs=HandoffStats(live=4))
    metrics = list(handoff_metrics([(["m", "decode-m-1"], decode)], [(["m", "encode-m-1"], encode)]))
    (live,) = [metric for metric in metrics if metric.name == "manta_handoffs_live"]
    found = {(sample.labels["engine"], sample.labels["pool"]): sample.value for sample in live.samples}
    assert found == {("decode-m-1", "prefill"): 2, ("decode-m-1", "encode"): 3, ("encode-m-1", "encode"): 4}
    (blocks,) = [metric for metric in metrics if metric.name == "manta_kv_blocks"]
    assert {sample.labels["engine"] for sample in blocks.samples} == {"decode-m-1", "encode-m-1"}


def test_blocks_of_all_states_add_up_to_all_blocks():
    stats = status("e").stats
    stats = msgspec.structs.replace(
        stats, blocks_free=2, blocks_cached=1, blocks_used=7, blocks_reserved=3, blocks_leased=2
    )
    found = series(msgspec.structs.replace(status("e"), stats=stats))
    blocks = {name[1]: value for name, value in found.items() if name[0] == "manta_kv_blocks"}
    assert blocks == {"free": 2, "cached": 1, "running": 2, "reserved": 3, "leased": 2}
    assert sum(blocks.values()) == stats.blocks_total


def test_blocks_of_each_of_several_kv_cache_groups_have_a_series():
    groups = {"0": {"used": 3, "cached": 1, "free": 6}, "1": {"used": 1, "cached": 0, "free": 2}}
    sizes = {"0": 4096, "1": 1024}
    stats = msgspec.structs.replace(status("e").stats, group_blocks=groups, group_block_bytes=sizes)
    found = series(msgspec.structs.replace(status("e"), stats=stats))
    blocks = {name[1:]: value for name, value in found.items() if name[0] == "manta_kv_group_blocks"}
    assert blocks == {(group, state): n for group, states in groups.items() for state, n in states.items()}
    assert {name[1]: value for name, value in found.items() if name[0] == "manta_kv_group_block_bytes"} == sizes
    assert stats.kv_usage == 1 / 3, "that of the fullest group"


def test_each_pipeline_stage_has_a_series_of_the_time_in_which_it_computed_and_waited():
    told = status("decode-m-1")
    told_stages = [
        StageStats(layers=2, ranks=1, busy_s=3.0, wait_s=1.0),
        StageStats(layers=1, ranks=1, busy_s=2.5, wait_s=1.5),
    ]
    found = series(
        msgspec.structs.replace(
            told, stats=msgspec.structs.replace(told.stats, parts=encoded(StageReport(told_stages)))
        )
    )
    assert (found["manta_stage_busy_seconds_total", "0"], found["manta_stage_wait_seconds_total", "0"]) == (3.0, 1.0)
    assert (found["manta_stage_busy_seconds_total", "1"], found["manta_stage_wait_seconds_total", "1"]) == (2.5, 1.5)
    assert not any(name[0].startswith("manta_stage") for name in series(told))


def test_ranks_that_share_experts_have_series_of_their_load():
    told = status("decode-m-1")
    loads = [
        ExpertStats(stage=0, rank_tokens=[30, 10], balancedness=0.8, top=[(3, 7, 0.4)], moved=2, stopped=True),
        ExpertStats(stage=1, rank_tokens=[20, 20], balancedness=1.0, top=[]),
    ]
    found = series(
        msgspec.structs.replace(told, stats=msgspec.structs.replace(told.stats, parts=encoded(ExpertReport(loads))))
    )
    assert [found["manta_expert_balancedness", stage] for stage in ("0", "1")] == [0.8, 1.0]
    assert [found["manta_expert_tokens_total", "0", rank] for rank in ("0", "1")] == [30, 10]
    assert found["manta_experts_moved_total", "0"] == 2
    assert [found["manta_expert_moves_stopped", stage] for stage in ("0", "1")] == [1, 0]
    assert not any("expert" in name[0] for name in series(told))


def test_engines_that_share_experts_have_series_of_their_steps_and_waits():
    told = status("decode-m-1.dp1")
    shared = SharedSteps(steps={"own": 3, "served": 5}, wait_s=0.5)
    stats = msgspec.structs.replace(told.stats, parts=encoded(shared))
    found = series(msgspec.structs.replace(told, stats=stats))
    assert found["manta_shared_steps_total", "own"] == 3.0 and found["manta_shared_steps_total", "served"] == 5.0
    assert found["manta_shared_wait_seconds_total",] == 0.5
    assert not any(name[0].startswith("manta_shared") for name in series(told))


def test_engine_that_hands_nothing_over_has_no_series_of_handoffs():
    assert not [name for name in series(status("e")) if name[0].startswith("manta_handoff")]


def test_decisions_are_counted_by_place_and_reason():
    told = encoded(HandoffTotals({"local": {"short_prompt": 3}}))
    engine = msgspec.structs.replace(status("e"), stats=msgspec.structs.replace(status("e").stats, parts=told))
    found = [sample for metric in part_metrics(handoffs, [], [(["m", "e"], engine)]) for sample in metric.samples]
    assert [(s.name, s.labels["where"], s.labels["reason"], s.value) for s in found] == [
        ("pd_decision_total", "local", "short_prompt", 3)
    ]


def test_drafted_tokens_are_counted_by_what_became_of_them_and_not_at_all_without_speculation():
    totals = DraftTotals()
    totals.observe(4, 2)
    totals.observe(2, 0)

    def samples(spec_decode: SpecDecodeStats | None) -> dict[tuple[str, str | None], float]:
        stats = msgspec.structs.replace(status("e").stats, parts=encoded(spec_decode))
        told = msgspec.structs.replace(status("e"), stats=stats)
        metrics = part_metrics(speculation, [(["m", "e"], told)], [])
        return {(s.name, s.labels.get("position")): s.value for metric in metrics for s in metric.samples}

    found = samples(totals.stats())
    assert found["vllm:spec_decode_num_drafts_total", None] == 2
    assert found["vllm:spec_decode_num_draft_tokens_total", None] == 6
    assert found["vllm:spec_decode_num_accepted_tokens_total", None] == 2
    per_position = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(4)]
    assert per_position == [1, 1, 0, 0]
    assert not [name for name, _ in samples(None) if "spec_decode" in name]


class Pool:
    """An EnginePool of fixed statuses."""

    def __init__(self, decode: list[ReplicaStatus], prefill: list[ReplicaStatus]):
        self._decode, self._prefill = decode, prefill

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        raise AssertionError("nothing is generated here")

    async def statuses(self) -> list[ReplicaStatus]:
        if not self._decode:
            raise EngineUnavailable("no replica is up and healthy")
        return self._decode

    async def asleep(self) -> bool:
        return False

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {"prefill": self._prefill}


def with_handoff(engine_id: str, age_s: float) -> ReplicaStatus:
    info = HandoffInfo(
        handoff_id=f"h-{engine_id}",
        request_id="r",
        role="decode",
        peer="p",
        state="reading",
        age_s=age_s,
        deadline_s=4.0,
    )
    return ReplicaStatus.of(msgspec.structs.replace(status(engine_id), live_handoffs=[info]), {})


def test_live_handoffs_of_both_pools_are_listed_oldest_first():
    pools = {"m": Pool([with_handoff("d1", 1.0)], [with_handoff("p1", 3.0)]), "n": Pool([], [with_handoff("p2", 2.0)])}
    found = asyncio.run(live_handoffs(pools)).handoffs
    assert [(live.model, live.engine) for live in found] == [("m", "p1"), ("n", "p2"), ("m", "d1")]

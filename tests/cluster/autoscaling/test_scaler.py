"""Two pools of one model: what each of them answers for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.scaler import (
    EngineCosts,
    Mean,
    ModelScaler,
    PoolLoad,
    ReplicaLoad,
    ScalingDecision,
    Stabilizer,
)
from cluster.autoscaling.slo import Limits, Slo
from deployments.routing.config import Role

COSTS = EngineCosts(decode_step_s=0.005, decode_sequence_s=0.001, token_s=0.001)


def limits(low: int = 1) -> Limits:
    return Limits(
        min_replicas=low,
        max_replicas=8,
        max_num_seqs=100,
        upscale_delay_s=0.0,
        downscale_delay_s=10.0,
        scale_to_zero_delay_s=20.0,
    )


class Pools:
    """Two pools that have what they are wished to have at once."""

    def __init__(self, low: int = 1):
        self.replicas: dict[Role, int] = {"decode": 1, "prefill": 1}
        self.scaler = ModelScaler(Slo(ttft_ms=1000, itl_ms=50), {"decode": limits(low), "prefill": limits(low)})
        self.now = 0.0

    def decide(self, decode: ReplicaLoad, prefill: ReplicaLoad, seconds: int = 1) -> dict[Role, ScalingDecision]:
        """Each replica has the given load."""
        for _ in range(seconds):
            self.now += 1.0
            loads: dict[Role, ReplicaLoad] = {"decode": decode, "prefill": prefill}
            pools = {
                role: PoolLoad(target_replicas=n, running_replicas=n, replicas=[loads[role]] * n)
                for role, n in self.replicas.items()
            }  # fmt: skip
            decisions = self.scaler.decide(pools, self.now)
            self.replicas = {role: decision.replicas for role, decision in decisions.items()}
        return decisions


IDLE = ReplicaLoad(costs=COSTS)


def test_prompts_scale_the_pool_that_computes_them():
    busy = ReplicaLoad(prefill_tokens_per_s=900, prefills_per_s=9, queued_tokens=500, costs=COSTS)
    decisions = Pools().decide(IDLE, busy)
    assert (decisions["prefill"].replicas, decisions["prefill"].reason) == (2, "ttft")
    assert decisions["decode"].replicas == 1


def test_sequences_scale_the_pool_that_decodes_them():
    busy = ReplicaLoad(running=60, output_tokens_per_s=900, costs=COSTS)
    decisions = Pools().decide(busy, IDLE)
    assert (decisions["decode"].replicas, decisions["decode"].reason) == (2, "itl")
    assert decisions["prefill"].replicas == 1


def test_images_scale_the_encode_pool_and_leave_prompts_to_the_others():
    busy = ReplicaLoad(prefill_tokens_per_s=900, prefills_per_s=9, queued_tokens=500, costs=COSTS)

    def decide(**loads: ReplicaLoad) -> dict[str, tuple[int, str]]:
        pools = {role: PoolLoad(target_replicas=1, running_replicas=1, replicas=[load]) for role, load in loads.items()}
        scaler = ModelScaler(Slo(ttft_ms=1000, itl_ms=50), {role: limits() for role in pools})
        return {role: (one.replicas, one.reason) for role, one in scaler.decide(pools, 1.0).items()}

    more = (2, "ttft")
    assert decide(encode=busy, decode=busy) == {"encode": more, "decode": more}, "decode engines compute their prompts"
    decisions = decide(encode=busy, prefill=busy, decode=busy)
    assert decisions["encode"] == decisions["prefill"] == more and decisions["decode"][0] == 1


def test_prompts_that_the_prefill_pool_had_no_room_for_count_for_it():
    spilling = ReplicaLoad(prefill_tokens_per_s=600, prefills_per_s=6, spilled_fraction=1.0, costs=COSTS)
    busy = ReplicaLoad(prefill_tokens_per_s=600, prefills_per_s=6, costs=COSTS)
    kept = ReplicaLoad(prefill_tokens_per_s=600, prefills_per_s=6, spilled_fraction=0.0, costs=COSTS)
    assert Pools().decide(kept, busy)["prefill"].replicas == 1
    decision = Pools().decide(spilling, busy)["prefill"]
    assert (decision.replicas, decision.reason) == (2, "ttft")
    assert decision.inputs["prefill_share"] == pytest.approx(1.2)


def test_a_prefill_pool_asleep_wakes_for_what_decode_has_to_compute_itself():
    pools = Pools(low=0)
    busy = ReplicaLoad(running=3, output_tokens_per_s=100, costs=COSTS)
    pools.decide(busy, IDLE, seconds=25)
    assert pools.replicas == {"decode": 1, "prefill": 0}
    few = ReplicaLoad(running=3, prefill_tokens_per_s=30, prefills_per_s=1, spilled_fraction=1.0, costs=COSTS)
    pools.decide(few, IDLE, seconds=5)
    assert pools.replicas["prefill"] == 0, "not worth a replica"
    many = ReplicaLoad(running=3, prefill_tokens_per_s=300, prefills_per_s=3, spilled_fraction=1.0, costs=COSTS)
    decision = pools.decide(many, IDLE)["prefill"]
    assert (decision.replicas, decision.reason) == (1, "wake")


def test_a_pool_without_work_does_not_grow_when_the_engine_that_is_left_is_a_slow_one():
    """Seed 301299 of tests.days: prompts that have ended cost more, as soon as only a slow engine tells what they
    cost."""
    scaler = ModelScaler(Slo(ttft_ms=1000), {"prefill": limits()})

    def decide(now: float, replicas: int, **load: float) -> int:
        replica = ReplicaLoad(costs=EngineCosts(token_s=0.001 if replicas > 1 else 0.01), **load)  # type: ignore[arg-type]
        pool = PoolLoad(target_replicas=replicas, running_replicas=replicas, replicas=[replica] * replicas)
        return scaler.decide({"prefill": pool}, now)["prefill"].replicas

    assert decide(1.0, 2, prefill_tokens_per_s=900, prefills_per_s=9) > 2
    counts = [2]
    for second in range(2, 60):
        counts.append(decide(float(second), counts[-1]))
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1


def test_growth_at_once_is_at_most_to_twice_what_is_up():
    flood = ReplicaLoad(running=100, waiting=5000, costs=COSTS)
    pools = Pools()
    assert [pools.decide(flood, IDLE)["decode"].replicas for _ in range(3)] == [2, 4, 8]


def test_a_pool_of_which_nothing_is_up_yet_does_not_grow():
    scaler = ModelScaler(Slo(), {"decode": limits()})
    starting = PoolLoad(target_replicas=1, running_replicas=0, replicas=[], waiting=5000)
    assert [scaler.decide({"decode": starting}, float(now))["decode"].replicas for now in range(5)] == [1] * 5


def test_what_steps_cost_is_remembered_while_nobody_reports():
    pools = Pools()
    pools.decide(ReplicaLoad(running=60, costs=COSTS), IDLE)
    assert pools.decide(ReplicaLoad(running=60), IDLE)["decode"].inputs["decode_step_s"] == COSTS.decode_step_s


def test_prompt_tokens_that_the_cache_spares_do_not_count_as_waiting():
    spared = ReplicaLoad(
        prefill_tokens_per_s=100, prefills_per_s=1, cached_tokens_per_s=300, queued_tokens=2000, costs=COSTS
    )
    assert Pools().decide(IDLE, spared)["prefill"].inputs["backlog_s"] == pytest.approx(0.5)


# -- smoothing --------------------------------------------------------------------------------------------


def test_a_mean_starts_with_its_first_value_and_follows_with_its_memory():
    mean = Mean(10.0)
    assert mean.add(8.0, 100.0) == 8.0
    assert mean.add(0.0, 110.0) == pytest.approx(8.0 * 0.36788, rel=1e-3)
    assert mean.add(5.0, 1000.0) == pytest.approx(5.0)


def test_a_clock_that_stands_still_changes_no_mean():
    mean = Mean(10.0)
    mean.add(8.0, 100.0)
    assert mean.add(0.0, 100.0) == 8.0


def test_more_is_given_once_it_was_wanted_for_the_delay():
    stabilizer = Stabilizer(up_s=3.0, down_s=60.0)
    assert [stabilizer.stabilize(4, 1, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1, 1, 1, 4, 4]


def test_a_dip_puts_growth_off():
    stabilizer = Stabilizer(up_s=3.0, down_s=60.0)
    desired_counts = [(0.0, 4), (2.0, 2), (4.0, 4), (6.0, 4)]
    assert [stabilizer.stabilize(desired, 1, now) for now, desired in desired_counts] == [1, 1, 2, 4]


def test_the_most_that_was_wanted_during_the_delay_stays():
    stabilizer = Stabilizer(up_s=0.0, down_s=60.0)
    desired_counts = [(0.0, 5), (30.0, 3), (59.0, 1), (61.0, 1), (91.0, 1)]
    assert [stabilizer.stabilize(desired, 5, now) for now, desired in desired_counts] == [5, 5, 5, 3, 1]


@given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(1, 30)), max_size=40), st.integers(1, 30))
def test_what_is_settled_lies_between_what_there_is_and_what_was_wished_for(gaps, start):
    stabilizer, now, current, desired_counts = Stabilizer(3.0, 30.0), 0.0, start, [start]
    for gap, desired in gaps:
        now += gap
        desired_counts.append(desired)
        current = stabilizer.stabilize(desired, current, now)
        assert min(desired_counts) <= current <= max(desired_counts)

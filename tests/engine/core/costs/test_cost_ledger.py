"""What each request costs. That the books balance after every step is checked by the harness of all scheduler tests."""

from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool
from engine.core.block_usage import BlockAccount
from engine.core.costs.cost_ledger import CostLedger
from engine.core.costs.step_cost import StepTimes, StepWork
from engine.core.stats import RequestMetrics
from engine.wire.messages import SequenceCost
from engine.wire.plan import StepPlan
from tests.engine.core.test_stats import finished_request
from tests.fake_handoffs import PrefillHarness
from tests.fake_runner import Harness


def ledger_of(times: StepTimes | None = None) -> CostLedger:
    return CostLedger(times or StepTimes(), [], 10.0)


def plan_of(*rows: tuple[int, int], drafts: dict[int, list[int]] | None = None) -> StepPlan:
    """rows: (start, count) of each sequence; all of them sample."""
    starts, counts = map(list, zip(*rows, strict=True))
    return StepPlan(1, [], [], list(range(len(rows))), starts, counts, [True] * len(rows), drafts=drafts or {})


def spend(ledger: CostLedger, plan: StepPlan, requests: list, began_at: float, ended_at: float) -> None:
    ledger.step(StepWork.of(plan), plan, requests, began_at, ended_at)
    ledger.check(requests)


def costs(harness: Harness) -> dict[str, SequenceCost]:
    return {name: event.delta.cost for name, event in harness.finished.items()}


def test_decodes_share_a_step_equally_and_the_time_before_it_is_overhead():
    ledger, requests = ledger_of(), [finished_request(RequestMetrics()) for _ in range(4)]
    spend(ledger, plan_of(*[(6, 1)] * 4), requests, 10.5, 12.5)
    assert [ledger.of(request) for request in requests] == [500_000_000] * 4
    assert (ledger.seconds["overhead"], ledger.seconds["requests"]) == (0.5, 2.0)
    ledger.spent("idle", 15.0)
    assert (ledger.seconds["idle"], ledger.wall_ns) == (2.5, 5_000_000_000)


def test_a_prompt_pays_for_its_tokens_by_what_they_have_cost_before():
    times = StepTimes()
    for _ in range(10):
        times.observe_step(StepWork(2, 0, 0), 0.010)  # a decode costs 5 ms
        times.observe_step(StepWork(0, 100, 1), 0.090)  # 100 tokens of prompts 90 ms
    ledger, requests = ledger_of(times), [finished_request(RequestMetrics()) for _ in range(3)]
    spend(ledger, plan_of((6, 1), (6, 1), (0, 100)), requests, 10.0, 10.2)  # twice as long as expected
    assert [ledger.of(request) / 1e9 for request in requests] == pytest.approx([0.010, 0.010, 0.180], rel=1e-3)


def test_what_a_preempted_request_computes_again_is_not_charged_to_it():
    harness = Harness(num_blocks=8, max_model_len=24)
    for i in range(4):
        harness.add(f"r{i}", [1, 2, 3, 4, i + 5], max_tokens=14)
    harness.run()
    preempted = {request.request_id for request in harness.seen if request.num_preemptions}
    wasted = {name for name, cost in costs(harness).items() if cost.wasted_s}
    assert wasted, "blocks ran out"
    assert wasted <= preempted  # the others found all but one of their tokens in the cache
    assert harness.ledger.ns["preemption"] == sum(request.cost.wasted_ns for request in harness.seen)


def test_nor_what_an_engine_computes_again_because_another_was_lost():
    harness = Harness(num_blocks=8, max_model_len=24)
    prompt, params = [1, 2, 3, 4, 5], {"seed": 1, "ignore_eos": True, "max_tokens": 8}
    harness.add("whole", prompt, **params)
    harness.run()
    harness.scheduler.clear_cache()
    harness.replay("again", prompt, harness.outputs["whole"][:4], **params)
    while harness.scheduler.has_work:
        harness.step()
    again, whole = costs(harness)["again"], costs(harness)["whole"]
    assert harness.ledger.ns["replay"] > 0 == whole.wasted_s
    assert again.wasted_s == pytest.approx(harness.ledger.seconds["replay"])


def test_what_a_step_computes_for_a_request_that_had_ended_is_overhead():
    harness = Harness(num_blocks=8, max_model_len=24, depth=2)
    harness.add("stays", [1, 2, 3, 4, 5], max_tokens=12)
    harness.add("leaves", [6, 7, 8, 9, 10], max_tokens=12)
    for _ in range(5):
        harness.step()
    assert harness.prepared, "a step is under way"
    harness.abort("leaves")
    paid_s = costs(harness)["leaves"].compute_s
    harness.run()
    paid = {request.request_id: harness.ledger.of(request) for request in harness.seen}
    assert paid["leaves"] / 1e9 == pytest.approx(paid_s)
    assert harness.ledger.ns["requests"] - sum(paid.values()) in (0, 1), "nobody is charged with the rest of the step"
    assert harness.ledger.ns["overhead"] > len(harness.plans) * 100_000, "more than what passed before each step"


def test_a_block_in_use_is_divided_among_those_who_hold_it_to_the_nanosecond():
    pool, first, second, third = BlockPool(4, 16), BlockAccount(), BlockAccount(), BlockAccount()
    (block,) = pool.allocate(1, first)
    pool.usage.now_ns = 10
    pool.reserve([block], 0, account=second)
    pool.reserve([block], 0, account=third)
    pool.usage.now_ns = 20  # 10 ns among three
    pool.release([block], second)
    pool.usage.now_ns = 31
    pool.release([block], third)
    pool.release([block], first)
    assert second.block_ns == 3
    assert sorted([first.block_ns, third.block_ns]) == [9, 19]
    assert first.block_ns + second.block_ns + third.block_ns == pool.usage.used_ns == 31


def test_a_prompt_that_is_cached_costs_what_is_left_of_it():
    harness = Harness(num_blocks=16, max_model_len=64, max_num_batched_tokens=64)
    prompt = list(range(1, 41))
    harness.add("first", prompt, max_tokens=1)
    harness.run()
    harness.add("second", prompt, max_tokens=1)
    harness.run()
    tokens = [plan.num_tokens for plan in harness.plans]
    assert tokens == [40, 4]
    first, second = costs(harness)["first"], costs(harness)["second"]
    assert first.wasted_s == second.wasted_s == 0.0


def test_a_prompt_for_another_engine_costs_it_nothing_if_nobody_reads_it():
    harness = PrefillHarness(num_blocks=16, max_model_len=24)
    harness.add_remote_prefill("read", [1, 2, 3, 4, 5])
    harness.add_remote_prefill("lost", [6, 7, 8, 9, 10])
    while harness.step() is not None:
        pass
    harness.close("read", "released")
    harness.close("lost", "expired")
    harness.check()
    assert 0 < harness.ledger.ns["handoff"] < harness.ledger.ns["requests"] + harness.ledger.ns["handoff"]
    assert harness.ledger.ns["handoff"] == pytest.approx(harness.ledger.ns["requests"], rel=0.01)

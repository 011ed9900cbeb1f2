"""What each request costs. That the books balance after every step is checked by the harness of all scheduler tests."""

from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool
from engine.core.door.inputs import CacheCleared
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.core.stats import RequestMetrics
from engine.costs.block_usage import BlockUsage, observe_usage
from engine.costs.request_cost import cost_of
from engine.costs.step_cost import StepTimes, StepWork
from engine.kv_transfer.protocol.messages import Envelope, Release, Released
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.options.handoff import HandoffConfig
from engine.parts.costs.cost_ledger import SUMS, CostLedger
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import MovesAsked
from engine.parts.kv_tiers.prefix_pins import pin, unpin
from engine.wire.handoff import AcceptPrefill, PromptCost, Spent
from engine.wire.parts.costs import SequenceCost
from engine.wire.plan import StepPlan
from engine.wire.remote_request import KVSource, Peer
from tests.engine.core.test_stats import finished_request
from tests.fake_handoffs import DecodeHarness, PrefillHarness
from tests.fake_runner import Harness


def ledger_of(times: StepTimes | None = None) -> CostLedger:
    return CostLedger(times or StepTimes(), [], [], 10.0)


def plan_of(*rows: tuple[int, int], drafts: dict[int, list[int]] | None = None) -> StepPlan:
    """rows: (start, count) of each sequence; all of them sample."""
    starts, counts = map(list, zip(*rows, strict=True))
    return StepPlan(1, [], [], list(range(len(rows))), starts, counts, [True] * len(rows), drafts=drafts or {})


def spend(ledger: CostLedger, plan: StepPlan, requests: list, began_at: float, ended_at: float) -> None:
    ledger.step(StepWork.of(plan), plan, requests, began_at, ended_at)
    ledger.check(requests)


def costs(harness: Harness) -> dict[str, SequenceCost]:
    return {name: event.delta.records(SequenceCost)[-1] for name, event in harness.finished.items()}


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
    assert harness.ledger.ns["preemption"] == sum(cost_of(request).wasted_ns for request in harness.seen)


def test_nor_what_an_engine_computes_again_because_another_was_lost():
    harness = Harness(num_blocks=8, max_model_len=24)
    prompt, params = [1, 2, 3, 4, 5], {"seed": 1, "ignore_eos": True, "max_tokens": 8}
    harness.add("whole", prompt, **params)
    harness.run()
    harness.scheduler.apply(CacheCleared(), harness.now)
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
    assert harness.ledger.ns["overhead"] > 0


def test_a_block_in_use_is_divided_among_those_who_hold_it_to_the_nanosecond():
    first, second, third = (finished_request(RequestMetrics()) for _ in range(3))
    pool = BlockPool(4, 16)
    (usage,) = observe_usage(KVCacheManager([SingleTypeKVCacheManager(pool)]))
    (block,) = pool.allocate(1, first)
    usage.now_ns = 10
    pool.reserve([block], 0, holder=second)
    pool.reserve([block], 0, holder=third)
    usage.now_ns = 20  # 10 ns among three
    pool.release([block], second)
    usage.now_ns = 31
    pool.release([block], third)
    pool.release([block], first)
    paid = [cost_of(request).blocks[0].block_ns for request in (first, second, third)]
    assert paid[1] == 3
    assert sorted([paid[0], paid[2]]) == [9, 19]
    assert sum(paid) == usage.used_ns == 31


def test_a_reference_that_nobody_has_is_paid_by_nobody():
    pool = BlockPool(4, 16)
    (usage,) = observe_usage(KVCacheManager([SingleTypeKVCacheManager(pool)]))
    (block,) = pin(pool, [], 1)
    usage.now_ns = 10
    pool.reserve([block], 0, holder=(request := finished_request(RequestMetrics())))
    usage.now_ns = 30
    unpin(pool, block)
    assert usage.shared.block_ns == 20
    assert usage.block_time(cost_of(request).blocks[0], [block]) == 10


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


def test_the_prompt_of_another_engine_costs_something_even_if_all_but_one_token_is_cached():
    harness = PrefillHarness(num_blocks=16, max_model_len=24)
    prompts = {"whole": [1, 2, 3, 4, 5], "rest": [1, 2, 3, 4, 6], "rest in a mixed step": [1, 2, 3, 4, 7]}
    for name, prompt in prompts.items():
        harness.add_remote_prefill(name, prompt)
        if "mixed" in name:
            harness.add_remote_prefill("other", [9, 10, 11])
        while harness.step() is not None:
            pass
        harness.close(name, "released")
    assert [plan.num_tokens for plan in harness.plans] == [5, 1, 4]
    paid = {request.request_id: harness.ledger.of(request) for request in harness.seen}
    assert paid == {name: report.cost.compute_ns for name, report in harness.reports.items()} and all(paid.values())


def test_a_prompt_for_another_engine_uses_kv_until_that_has_read_it():
    harness = PrefillHarness(num_blocks=16, max_model_len=24)
    harness.add_remote_prefill("read", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    while harness.step() is not None:
        pass
    protocol = HandoffProtocol(HandoffConfig(role="prefill"), Peer("prefill", "", 1), ranks=[], block_size=4)
    protocol.apply(AcceptPrefill(harness.remote_requests["read"]), 0.0)
    protocol.apply(harness.reports["read"], 0.0)
    harness.ledger.spent("idle", harness.clock + 5.0)
    released = Envelope(harness.remote_requests["read"].decode, 1, Release("read", 1))
    for at in (harness.clock + 5.0, harness.clock + 6.0):  # the answer to the first one is lost
        protocol.receive(released, at)
        assert protocol.out.messages[-1][1] == Released("read", 1, True, harness.ledger.block_usages[0].used_ns * 2**30)
    assert harness.ledger.block_usages[0].used_ns > 3 * 5.0e9


def test_a_client_that_leaves_pays_for_what_the_other_engine_has_told():
    harness = PrefillHarness(num_blocks=16, max_model_len=24, max_num_batched_tokens=4, max_num_seqs=4)
    harness.add_remote_prefill("left", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    harness.step()
    told = harness.reports["left"].cost.compute_ns
    harness.step()
    harness.close("left", "cancelled", told)
    (request,) = harness.seen
    assert harness.ledger.of(request) == told > 0
    assert harness.ledger.ns["handoff"] == cost_of(request).wasted_ns > 0


def test_the_engine_that_answers_bills_what_other_engines_have_spent_on_the_prompt_unless_that_was_in_vain():
    harness = DecodeHarness(num_blocks=16, max_model_len=24)
    spent = PromptCost(3_000_000, 2**30 * 5e9)
    for name in ("answered", "left"):
        harness.add(name, [1, 2, 3, 4, 5], max_tokens=1)
    harness.step()
    lost, left = harness.open
    harness.handle(Spent(lost, PromptCost(9_000_000, 2**30 * 9e9)))
    harness.fail(lost)
    harness.step()
    (again,) = harness.open.keys() - {left}
    for handoff_id in (left, again):
        harness.handle(Spent(handoff_id, spent))
    harness.receive(again, byte_ns=2**30 * 7e9)
    harness.abort("left")
    harness.fail(left)
    for name, kv_gib_s in (("answered", 7.0), ("left", 5.0)):
        assert costs(harness)[name].compute_s == 0.003
        own = sum(account.block_ns for account in cost_of(harness.finished[name].request).blocks.values()) / 1e9
        assert costs(harness)[name].kv_gib_s == pytest.approx(kv_gib_s + own, abs=0.01)
    assert harness.cancelled == {left: 3_000_000}


def test_what_a_request_has_cost_before_it_moves_is_not_wasted():
    harness = Harness(handoffs=Handoffs(None, Peer("leaving", "", 1)), num_blocks=16, max_model_len=24)
    harness.add("moves", [1, 2, 3, 4, 5], max_tokens=12)
    for _ in range(4):
        harness.step()
    harness.scheduler.apply(MovesAsked(1), harness.now)
    while "moves" not in harness.finished:
        harness.step()
    assert harness.finished["moves"].delta.records(KVSource)
    (request,) = harness.seen
    cost = costs(harness)["moves"]
    assert cost.wasted_s == harness.ledger.ns["handoff"] == 0
    assert cost.compute_s == harness.ledger.of(request) / 1e9 > 0


def test_what_is_computed_again_is_known_although_nobody_else_decodes_meanwhile():
    ledger, both = ledger_of(), [finished_request(RequestMetrics()) for _ in range(2)]
    first, second = both
    for i, start in enumerate((4, 5)):
        spend(ledger, plan_of((start, 1), (start, 1)), both, 10.0 + i, 11.0 + i)
    second.num_preemptions = 1
    drafting, again = plan_of((6, 3), drafts={0: [1, 2]}), plan_of((0, 6))
    ledger.step(StepWork.of(drafting), drafting, [first], 12.0, 13.0)
    ledger.step(StepWork.of(again), again, [second], 13.0, 14.0)
    ledger.check(both)
    assert ledger.seconds["preemption"] == pytest.approx(1.0)


def test_kv_memory_counts_while_it_is_used_and_not_only_once_it_is_free():
    harness = Harness(num_blocks=8, max_model_len=24)
    harness.add("long", [1, 2, 3, 4, 5], max_tokens=3)
    harness.step()
    before_s, harness.clock = harness.ledger.kv_gib_s, harness.clock + 100.0
    harness.ledger.spent("idle", harness.clock)
    assert harness.ledger.kv_gib_s == pytest.approx(before_s + 200.0)  # blocks of 1 GiB


def test_telling_the_cost_with_every_token_does_not_sum_all_blocks_with_every_token(monkeypatch):
    summed = []
    share = BlockUsage.share
    monkeypatch.setattr(BlockUsage, "share", lambda usage, held: summed.append(len(held)) or share(usage, held))
    harness = Harness(num_blocks=128, max_model_len=512, max_num_batched_tokens=512)
    harness.add("told", [i % 40 + 1 for i in range(300)], max_tokens=100)
    (request,) = harness.scheduler.queue.live.values()
    cost_of(request).reported = True
    while not harness.outputs["told"]:
        harness.step()
    summed.clear()
    harness.run()
    assert 0 < sum(summed[:-1]) <= 100 * SUMS, "the last one, at the end, has no blocks"
    exact = harness.ledger.kv_gib_s
    assert costs(harness)["told"].kv_gib_s == pytest.approx(exact)


@pytest.mark.parametrize("prompt", [5, 300])
def test_the_cost_that_is_told_with_a_token_is_that_of_all_blocks_so_far(prompt, monkeypatch):
    told = []
    monkeypatch.setattr(Harness, "_record", lambda harness, event: told.append((event, harness.ledger.kv_gib_s)))
    harness = Harness(num_blocks=128, max_model_len=512, max_num_batched_tokens=512)
    harness.add("told", [i % 40 + 1 for i in range(prompt)], max_tokens=100)
    (request,) = harness.scheduler.queue.live.values()
    cost_of(request).reported = True
    while harness.scheduler.has_work:
        harness.step()
    assert len(told) == 100
    for event, used in told:
        assert event.delta.records(SequenceCost)[-1].kv_gib_s == pytest.approx(used, rel=0.02)

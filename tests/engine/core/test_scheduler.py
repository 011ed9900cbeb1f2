import pytest

from engine.core.request import State
from engine.errors import InvalidParameter, Overloaded, PromptTooLong
from engine.wire.plan import StepResult
from tests.fake_runner import EOS, Harness, expected_output


def ids(count: int, start: int = 1) -> list[int]:
    return [(start + i) % 49 + 1 for i in range(count)]


@pytest.fixture(params=[1, 2], ids=["plain", "overlap"])
def depth(request) -> int:
    return request.param


def test_a_request_alone_gives_its_expected_output(depth):
    h = Harness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(10), max_tokens=20)
    h.run()
    assert h.finished["a"].delta.finish_reason == "length"


def test_decodes_and_prompt_chunks_share_one_step(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    h.add("a", ids(5), max_tokens=10)
    while not h.outputs["a"]:
        h.step()
    h.add("b", ids(20, 7))
    h.step()
    assert h.plans[-1].counts == [1, 20]
    h.run()


def test_a_long_prompt_is_cut_into_chunks_that_fit_the_budget(depth):
    h = Harness(num_blocks=64, max_model_len=128, depth=depth, max_num_batched_tokens=16)
    h.add("a", ids(100))
    h.run()
    assert [p.counts[0] for p in h.plans[:7]] == [16, 16, 16, 16, 16, 16, 4]


def test_a_long_prompt_leaves_a_token_to_everyone_behind_it(depth):
    h = Harness(num_blocks=64, max_model_len=200, depth=depth, max_num_batched_tokens=16, scheduling_policy="priority")
    for name in "bcd":
        h.add(name, ids(3, 20), max_tokens=16)
    while not all(h.outputs[name] for name in "bcd"):
        h.step()
    h.add("long", ids(100), max_tokens=2, priority=-1)
    h.step()
    h.step()
    assert h.plans[-1].counts == [1, 1, 1, 13], "the long prompt comes first in order, but not alone"
    h.run()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_prompts_around_block_boundaries(length, depth):
    h = Harness(num_blocks=16, max_model_len=32, depth=depth)
    h.add("a", ids(length), max_tokens=6)
    h.run()
    h.add("b", ids(length), max_tokens=6)
    h.run()
    cached = h.finished["b"].request.prefix.num_cached
    assert cached == (length - 1) // 4 * 4, "all full blocks but the one with the last token"


def test_a_prompt_that_leaves_room_for_one_token_gets_one(depth):
    h = Harness(num_blocks=8, max_model_len=32, depth=depth)
    h.add("a", ids(31), max_tokens=None)
    h.run()
    assert len(h.outputs["a"]) == 1
    assert h.finished["a"].delta.finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused_with_the_limit():
    h = Harness(num_blocks=8, max_model_len=32)
    with pytest.raises(PromptTooLong, match=r"32 tokens > 31 maximum .*context length is 32 tokens"):
        h.add("a", ids(32))
    assert not h.scheduler.has_work


def test_what_cannot_be_served_is_refused_and_leaves_no_trace():
    h = Harness(num_blocks=8, max_model_len=32, max_waiting=1)
    with pytest.raises(InvalidParameter, match="prompt must be at least one token"):
        h.add("a", [])
    with pytest.raises(InvalidParameter, match="prompt must be token ids from 0 to 49, got 50"):
        h.add("a", [1, 50])
    with pytest.raises(InvalidParameter, match="stop_token_ids must be a token id below 50, got 99"):
        h.add("a", [1], stop_token_ids=[99])
    h.add("a", [1])
    with pytest.raises(Overloaded):
        h.add("b", [1])
    with pytest.raises(InvalidParameter, match="request_id"):
        h.add("a", [1])
    h.run()


def test_end_of_sequence_and_stop_tokens_end_a_request(depth):
    h = Harness(num_blocks=64, max_model_len=256, depth=depth)
    h.add("eos", ids(3), max_tokens=200, ignore_eos=False)
    token = expected_output(ids(3), h.params["eos"], 256)[2]
    h.add("stop", ids(3), max_tokens=200, stop_token_ids=[token])
    h.run()
    assert h.outputs["eos"][-1] == EOS
    assert h.finished["stop"].delta.stop_reason == token
    assert h.finished["stop"].delta.finish_reason == "stop"


def test_a_pool_too_small_for_the_batch_preempts_and_everyone_finishes(depth):
    h = Harness(num_blocks=10, max_model_len=40, depth=depth)
    for i in range(6):
        h.add(f"r{i}", ids(4, 5 * i), max_tokens=30)
    h.run()
    assert h.scheduler.totals.preemptions > 0
    assert all(event.delta.finish_reason == "length" for event in h.finished.values())


def test_the_first_in_order_is_never_preempted(depth):
    h = Harness(num_blocks=8, max_model_len=32, depth=depth)
    for i in range(5):
        h.add(f"r{i}", ids(4, 5 * i), max_tokens=28)
    h.run()
    assert h.finished["r0"].delta.num_preemptions == 0


def test_preempted_request_reuses_its_own_cached_prefix(depth):
    h = Harness(num_blocks=12, max_model_len=48, depth=depth)
    h.add("a", ids(4), max_tokens=20)
    h.add("b", ids(20, 25), max_tokens=20)
    h.run()
    assert h.finished["b"].delta.num_preemptions == 1
    assert h.scheduler.totals.recomputed_tokens < 20, "of its 32 tokens, those not evicted were still cached"


def test_preemption_with_prefix_cache_and_chunks_together(depth):
    h = Harness(num_blocks=14, max_model_len=56, depth=depth, max_num_batched_tokens=9, max_num_seqs=4)
    shared = ids(12)
    for i in range(8):
        h.add(f"r{i}", shared + ids(3 + i, 7 * i), max_tokens=25)
    h.run()
    assert h.scheduler.totals.preemptions > 0
    assert h.scheduler.totals.prefix_hit_tokens > 0


def test_the_cheapest_then_newest_of_those_behind_is_preempted():
    h = Harness(num_blocks=12, max_model_len=40)
    h.add("first", ids(4), max_tokens=36)
    h.add("dear", ids(15, 10), max_tokens=8)
    h.add("cheap", ids(7, 20), max_tokens=8)
    h.add("cheap and new", ids(7, 30), max_tokens=8)
    while not h.scheduler.totals.preemptions:
        h.step()
    assert [r.request_id for r in h.scheduler.queue.waiting] == ["cheap and new"]
    h.run()


def test_two_requests_computing_one_prefix_at_once_end_up_sharing_it(depth):
    h = Harness(num_blocks=16, max_model_len=32, depth=depth)
    h.add("a", [*ids(12), 40], max_tokens=4)
    h.add("b", [*ids(12), 41], max_tokens=4)
    while not (h.outputs["a"] and h.outputs["b"]):
        h.step()
    a, b = h.scheduler.queue.running
    assert a.tables[0].blocks[:3] == b.tables[0].blocks[:3]
    assert a.tables[0].blocks[3] != b.tables[0].blocks[3]
    h.run()


def test_a_later_request_starts_from_the_cached_prefix(depth):
    h = Harness(num_blocks=16, max_model_len=32, depth=depth)
    h.add("a", ids(13), max_tokens=2)
    h.run()
    h.add("b", ids(13), max_tokens=2)
    h.step()
    assert (h.plans[-1].starts, h.plans[-1].counts) == ([12], [1])
    h.run()
    assert h.scheduler.totals.prefix_hit_tokens == 12


def test_a_different_salt_shares_nothing(depth):
    h = Harness(num_blocks=16, max_model_len=32, depth=depth)
    h.add("a", ids(13), max_tokens=2, cache_salt="one")
    h.run()
    h.add("b", ids(13), max_tokens=2, cache_salt="two")
    h.run()
    assert h.scheduler.totals.prefix_hit_tokens == 0


def test_abort_frees_blocks_in_every_state(depth):
    h = Harness(num_blocks=10, max_model_len=40, depth=depth, max_num_batched_tokens=8)
    for i in range(4):
        h.add(f"r{i}", ids(9, 11 * i), max_tokens=25)
    h.abort("r3")  # waiting
    h.step()
    h.abort("r0")  # half of its prompt computed
    while not h.outputs["r1"]:
        h.step()
    h.abort("r1")  # decoding, and with overlap its next token is in flight
    h.abort("r1")  # once more changes nothing
    h.abort("unknown")
    h.run()
    assert [h.finished[f"r{i}"].delta.finish_reason for i in range(4)] == ["abort", "abort", "length", "abort"]


def test_abort_of_a_preempted_request_whose_token_is_still_in_flight():
    h = Harness(num_blocks=10, max_model_len=40, depth=2)
    for i in range(4):
        h.add(f"r{i}", ids(4, 5 * i), max_tokens=30)
    h.plan()
    while not h.scheduler.totals.preemptions:
        h.plan()
        if not h.scheduler.totals.preemptions:
            h.commit()
    request = h.scheduler.queue.waiting[0]
    assert request.in_flight == 1
    h.abort(request.request_id)
    h.run()


def test_smaller_priority_values_run_first_under_the_priority_policy():
    h = Harness(num_blocks=64, max_model_len=32, max_num_seqs=1, scheduling_policy="priority")
    h.add("late", ids(4), priority=5, max_tokens=2)
    h.add("soon", ids(4), priority=-1, max_tokens=2)
    h.add("middle", ids(4), priority=0, max_tokens=2)
    h.run()
    assert list(h.finished) == ["soon", "middle", "late"]


def test_priority_is_ignored_under_fcfs():
    h = Harness(num_blocks=64, max_model_len=32, max_num_seqs=1)
    h.add("a", ids(4), priority=5, max_tokens=2)
    h.add("b", ids(4), priority=-1, max_tokens=2)
    h.run()
    assert list(h.finished) == ["a", "b"]


def test_logits_that_are_not_finite_end_their_own_request_only():
    h = Harness(num_blocks=64, max_model_len=32)
    h.add("good", ids(4), max_tokens=2)
    h.add("bad", ids(4, 9), max_tokens=2)
    plan = h.scheduler.schedule(now=0.0)
    result = h.runner.execute(h.runner.prepare(plan))
    broken = StepResult(result.step, [result.tokens[0], [-1]], result.logprobs, result.prompt_logprobs)
    h.scheduler.commit(broken, now=0.0)
    good, bad = h.scheduler.out.take_events()
    assert good.delta.finish_reason is None
    assert bad.delta.finish_reason == "error" and "not finite" in bad.delta.error.message
    assert bad.request.state is State.FINISHED
    h.scheduler.check()


def test_a_request_that_is_preempted_before_its_logits_are_found_not_finite_ends_alone():
    h = Harness(num_blocks=8, max_model_len=32, depth=2)
    h.add("good", ids(8), max_tokens=20)
    h.add("bad", ids(8, 9), max_tokens=20)
    bad = h.scheduler.queue.live["bad"]
    while not (bad.num_preemptions and bad.in_flight):
        h.step()
    (_, requests), done = h.scheduler.planned[0], h.runner.execute(h.prepared.pop(0))
    tokens = [[-1] if request is bad else some for request, some in zip(requests, done.tokens, strict=True)]
    h.scheduler.commit(StepResult(done.step, tokens, done.logprobs, done.prompt_logprobs), now=0.0)
    ended = [event for event in h.scheduler.out.take_events() if event.delta.error is not None]
    assert [event.request for event in ended] == [bad]
    assert "not finite" in ended[0].delta.error.message
    h.scheduler.check()


def test_blocks_of_a_prompt_that_is_aborted_before_its_logits_are_known_are_cleared_for_the_next():
    h = Harness(num_blocks=8, max_model_len=32, max_num_batched_tokens=8)
    h.add("gone", ids(16, 9))
    h.step()
    blocks = set(h.scheduler.queue.live["gone"].tables[0].blocks)
    h.abort("gone")
    h.add("next", ids(28), max_tokens=5)
    h.run()
    assert {block for plan in h.plans for change in plan.blocks for block, _ in change.cleared} == blocks != set()


def test_blocks_of_a_request_that_is_preempted_before_its_logits_are_known_are_cleared_for_the_next():
    h = Harness(num_blocks=8, max_model_len=32, depth=2)
    h.add("first", ids(8), max_tokens=20)
    h.add("preempted", ids(8, 9), max_tokens=20)
    preempted, blocks = h.scheduler.queue.live["preempted"], []
    while not preempted.num_preemptions:
        blocks = [block for table in preempted.tables for block in table.blocks[preempted.finite // 4 :]]
        h.step()
    h.run()
    cleared = {block for plan in h.plans for change in plan.blocks for block, _ in change.cleared}
    assert cleared == set(blocks) != set() and len(blocks) <= 2, "and none of those that are known to be finite"


def test_times_are_given_with_the_last_delta():
    h = Harness(num_blocks=8, max_model_len=32)
    h.add("a", ids(4), max_tokens=1)
    h.scheduler.queue.live["a"].clock.arrived_at = 10.0
    plan = h.scheduler.schedule(now=12.0)
    h.scheduler.commit(h.runner.execute(h.runner.prepare(plan)), now=15.0)
    (event,) = h.scheduler.out.take_events()
    assert event.delta.times.scheduled_s == 2.0
    assert event.delta.times.first_token_s == event.delta.times.finished_s == 5.0


def test_a_prefix_that_another_request_computes_in_this_step_is_not_computed_twice(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth, max_num_batched_tokens=16)
    for i in range(4):
        h.add(f"r{i}", [*ids(24), 40 + i], max_tokens=4)
    h.run()
    assert sum(count for plan in h.plans for count in plan.counts if count > 1) == 25, "only the first prompt"
    assert h.scheduler.totals.prefix_hit_tokens == 3 * 24


def test_a_cleared_cache_makes_nobody_wait_for_blocks_that_are_not_entered_again(depth):
    h = Harness(num_blocks=64, max_model_len=64, depth=depth)
    h.add("a", ids(12), max_tokens=40)
    while not h.outputs["a"]:
        h.step()
    h.scheduler.kv_cache.pool.clear_cache()
    h.add("b", ids(12), max_tokens=4)
    while not h.outputs["b"]:
        h.step()
    assert "a" not in h.finished
    h.run()


@pytest.mark.parametrize("stages", [2, 3])
def test_with_stages_a_step_takes_its_share_of_the_requests_and_none_that_waits_for_a_token(stages):
    h = Harness(num_blocks=64, max_model_len=64, depth=stages, stages=stages)
    names = "abcdef"
    for i, name in enumerate(names):
        h.add(name, ids(4, i), max_tokens=12)
    while not all(h.outputs[name] for name in names):
        h.step()
    h.run()
    decodes = [plan for plan in h.plans if set(plan.counts) == {1}]
    assert max(len(plan.slots) for plan in decodes) == len(names) // stages
    for i, plan in enumerate(h.plans):
        under_way = {slot for other in h.plans[max(0, i - stages + 1) : i] for slot in other.slots}
        assert not under_way & set(plan.slots)


def test_with_stages_a_prompt_is_cut_into_chunks_of_which_none_waits_for_another():
    h = Harness(num_blocks=600, max_model_len=2200, depth=2, stages=2, max_num_batched_tokens=2048)
    h.add("long", ids(2000), max_tokens=2)
    h.add("short", ids(100, 9), max_tokens=2)
    h.run()
    counts = [plan.counts[plan.slots.index(0)] for plan in h.plans if 0 in plan.slots]
    assert counts[:4] == [500] * 4
    longer = [plan.step for plan in h.plans if 500 in plan.counts]
    assert longer == [1, 2, 3, 4]


def test_with_stages_a_long_prompt_takes_no_turn_from_requests_behind_it():
    h = Harness(
        num_blocks=1200, max_model_len=4200, depth=3, stages=2, max_num_batched_tokens=600, scheduling_policy="priority"
    )
    h.add("decodes", ids(4), max_tokens=20, priority=1)
    while not h.outputs["decodes"]:
        h.step()
    h.add("long", ids(4000, 9), max_tokens=2, priority=0)
    while not h.outputs["long"]:
        h.step()
    assert len(h.outputs["decodes"]) > 2
    h.run()


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_with_stages_a_prompt_alone_in_a_pool_of_one_window_waits_for_its_steps_and_never_preempts_itself(caching):
    h = Harness(
        num_blocks=0, windows=(1,), blocks=[3], step_tokens=1, block_size=1, max_model_len=24, depth=4, stages=3,
        max_num_batched_tokens=5, max_num_seqs=1, enable_prefix_caching=caching,
    )  # fmt: skip
    h.add("a", ids(9), max_tokens=4)
    h.run(limit=200)
    assert h.scheduler.totals.preemptions == 0

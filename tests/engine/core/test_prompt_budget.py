"""What a step has for prompts: docs/scheduling.md."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.wire.plan import StepPlan
from tests.examples import examples
from tests.fake_handoffs import PrefillHarness
from tests.fake_runner import Harness

OLDEST = 4  # the oldest prompt gets one part in so many
LEAST = 64  # a step has room for one part of its tokens in so many, however long it takes, and for a block of 4


def ids(count: int, start: int = 1) -> list[int]:
    """Tokens that share no block with those of another start."""
    return [(start * 7 + i * (start % 5 + 1)) % 49 + 1 for i in range(count)]


def make(budget: int = 32, **options) -> Harness:
    sizes = {"num_blocks": 1000, "max_model_len": 2000, "max_num_batched_tokens": budget, "max_num_seqs": 16}
    return Harness(**sizes | options)


def count_of(h: Harness, name: str) -> int:
    """Tokens that the newest step computes of a request."""
    request, plan = h.scheduler.queue.live[name], h.plans[-1]
    return dict(zip(plan.slots, plan.counts, strict=True)).get(request.slot, 0)


def run_until_answered(h: Harness, name: str, limit: int = 1000) -> int:
    """Steps until a request has a token."""
    for step in range(1, limit):
        h.step()
        if h.outputs[name]:
            return step
    raise AssertionError(f"{name} got no token in {limit} steps")


# -- the order of prompts ----------------------------------------------------------------------------------


def test_a_short_prompt_is_computed_before_what_is_left_of_a_long_one():
    h = make()
    h.add("long", ids(300))
    h.step()
    h.add("short", ids(20, 2))
    h.step()
    assert (count_of(h, "short"), count_of(h, "long")) == (20, 12)
    assert h.outputs["short"]
    h.run()


def test_a_long_prompt_of_which_little_is_to_be_computed_is_a_short_one():
    h = make()
    h.add("turn", ids(200))
    h.run()
    h.add("cold", ids(300, 2))
    h.add("next turn", ids(210))
    h.step()
    assert (count_of(h, "next turn"), count_of(h, "cold")) == (10, 22)
    h.run()


def test_the_oldest_prompt_keeps_its_share_while_shorter_ones_want_more_than_the_rest():
    h = make()
    h.add("oldest", ids(300))
    h.step()
    for i in range(3):
        h.add(f"short {i}", ids(20, i + 2))
    h.step()
    counts = [count_of(h, name) for name in ("oldest", "short 0", "short 1")]
    assert counts == [32 // OLDEST, 20, 4]
    h.run()


def test_a_client_that_cuts_its_work_into_short_prompts_gains_nothing():
    h = make()
    h.add("oldest", ids(300), client="c")
    h.step()
    for i in range(4):
        h.add(f"a{i}", ids(12, i + 2), client="a")
    h.add("b", ids(20, 7), client="b")
    h.step()
    assert count_of(h, "a0") == 12 and count_of(h, "b") == 12 and count_of(h, "a1") == 0
    h.run()


def test_a_more_urgent_prompt_comes_before_a_shorter_one():
    h = make(scheduling_policy="priority")
    h.add("long", ids(100), priority=-1)
    h.add("short", ids(10, 2), priority=0)
    h.step()
    assert (count_of(h, "long"), h.scheduler.queue.live["short"].slot) == (32, -1)
    h.run()


@pytest.mark.parametrize(
    ("slo_s", "waits_s", "is_next"),
    [
        (2.5, 0.0, True),  # 96 tokens and a step take 1.28 s
        (None, 0.0, False),
        (2.7, 0.0, False),  # there is time
        (2.7, 0.2, True),
        (2.5, 2.6, False),  # it is too late
    ],
)
def test_a_prompt_whose_first_token_is_wanted_soon_comes_before_shorter_ones(slo_s, waits_s, is_next):
    h = make(max_prefill_step_s=0.32)
    h.seconds = linear(0.0, 0.01)
    h.add("warm up", ids(32, 5), max_tokens=1)
    h.run()
    h.add("short", ids(30))
    h.add("wanted", ids(96, 2), ttft_slo_s=slo_s)
    h.now += waits_s
    h.step()
    kept = 32 // OLDEST
    assert (count_of(h, "short"), count_of(h, "wanted")) == ((kept, 32 - kept) if is_next else (30, 2))
    h.run()


def test_of_two_prompts_that_are_wanted_soon_the_one_that_is_due_first_comes_first():
    h = make(max_prefill_step_s=0.32)
    h.add("cold", ids(300))
    h.add("later", ids(40, 2), ttft_slo_s=0.5)
    h.add("sooner", ids(60, 3), ttft_slo_s=0.4)
    h.step()
    assert [count_of(h, name) for name in ("cold", "later", "sooner")] == [32 // OLDEST, 0, 32 - 32 // OLDEST]
    h.run()


def test_an_engine_that_computes_prompts_for_others_follows_the_same_rule():
    h = PrefillHarness(num_blocks=200, max_model_len=400, max_num_batched_tokens=32)
    h.add_remote_prefill("long", ids(300))
    h.step()
    h.add_remote_prefill("short", ids(20, 2))
    h.step()
    assert sorted(h.plans[-1].counts) == [12, 20]
    h.add_remote_prefill("wanted", ids(100, 3), ttft_slo_s=0.3)
    h.step()
    assert sorted(h.plans[-1].counts) == [32 // OLDEST, 32 - 32 // OLDEST]


def test_a_prefix_that_a_prompt_later_in_the_step_computes_is_not_computed_twice():
    h = make(budget=16)
    h.add("first", [*ids(48), *ids(60, 2)], max_tokens=1)
    h.step()
    h.add("shorter", [*ids(48), *ids(5, 3)], max_tokens=1)
    h.run()
    assert sum(plan.num_tokens for plan in h.plans) == 48 + 60 + 5


# -- nobody starves ----------------------------------------------------------------------------------------


@given(
    length=st.integers(1, 120),
    arrivals=st.lists(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=4), max_size=10),
    budget=st.integers(8, 64),
    depth=st.integers(1, 2),
)
@settings(max_examples=examples(100))
def test_a_prompt_gets_its_first_token_within_a_bound_whatever_comes_after_it(length, arrivals, budget, depth):
    """Shorter prompts come in every step, some of the same client."""
    h = make(budget, depth=depth, max_num_seqs=4)
    h.add("cold", ids(length))
    bound = -(-length * OLDEST // (budget - 3)) + 2 * depth  # at most three others decode
    for step in range(bound):
        for i, (short, same) in enumerate(arrivals[step % len(arrivals)] if arrivals else ()):
            if h.scheduler.num_waiting < 8:
                h.add(f"{step}.{i}", ids(short, step + i + 2), max_tokens=3, client="" if same else "b")
        h.step()
        if h.outputs["cold"]:
            break
    assert h.outputs["cold"]


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    decodes=st.integers(0, 3),
    budget=st.integers(8, 40),
    num_blocks=st.integers(24, 60),
)
@settings(max_examples=examples(300))
def test_no_step_leaves_tokens_unused_while_a_prompt_waits_that_fits(sizes, decodes, budget, num_blocks):
    h = Harness(num_blocks=num_blocks, max_model_len=90, max_num_batched_tokens=budget, max_num_seqs=6)
    for i in range(decodes):
        h.add(f"d{i}", ids(1, i), max_tokens=40)
    h.step()
    for i, size in enumerate(sizes):
        h.add(f"r{i}", ids(size, i + 3), max_tokens=4)
    while h.scheduler.has_work:
        preempted = h.scheduler.totals.preemptions
        if (plan := h.plan()) is None or plan.num_tokens == budget or h.scheduler.totals.preemptions > preempted:
            h.commit()
            continue
        queue, pool = h.scheduler.queue, h.pool
        assert all(request.pending <= 1 for request in queue.running), "a running prompt could go on"
        available = pool.num_available - len(queue.running)
        for request in queue.waiting if queue.has_free_slot else ():
            matched = h.scheduler.kv_cache.match(request, as_it_is)
            shared = h.scheduler.kv_cache.in_flight(request, matched, queue.running)
            earlier = [other for other in queue.waiting if other.order < request.order]
            barred = any(map(h.scheduler.prompts.is_overdue, earlier))
            assert shared or barred or -(-len(request.tokens) // 4) > available, f"{request.request_id} could start"
        h.commit()


def as_it_is(request, matched, block_size):
    return matched


def test_a_prompt_that_lacks_blocks_is_overtaken_by_no_more_tokens_than_it_has():
    h = Harness(num_blocks=32, max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8)
    h.add("runs", ids(60), max_tokens=20)
    h.step()
    h.add("large", ids(90, 2), max_tokens=2)
    count = 0
    while not h.outputs["large"]:
        h.add(f"small {count}", ids(9, count + 3), max_tokens=2)
        h.step()
        count += 1
    started = [len(sequence.tokens) for plan in h.plans for sequence in plan.added]
    overtaking = started[1 : started.index(90)]
    assert overtaking == [9] * 10
    h.run()


# -- seconds -----------------------------------------------------------------------------------------------


def plan_of(counts: list[int]) -> StepPlan:
    return StepPlan(step=1, added=[], blocks=[], slots=[], starts=[], counts=counts, samples=[])


def linear(fixed: float, per_token: float):
    return lambda plan: fixed + per_token * plan.num_tokens


@given(
    fixed=st.floats(0.0, 0.02),
    per_token=st.floats(0.00001, 0.01),
    decodes=st.integers(0, 100),
    bound=st.floats(0.03, 0.2),
    before=st.lists(st.tuples(st.integers(2, 2048), st.floats(0.0, 5.0)), max_size=5),
)
def test_steps_with_prompts_keep_to_their_seconds_whatever_was_measured_before(
    fixed, per_token, decodes, bound, before
):
    h = make(2048, max_prefill_step_s=bound)
    budget = h.scheduler.prompts
    for tokens, seconds in before:
        budget.observe(plan_of([tokens]), seconds)
    for _ in range(200):
        prompt = budget.tokens(2048 - decodes)
        seconds = fixed + per_token * (decodes + prompt)
        budget.observe(plan_of([1] * decodes + [prompt]), seconds)
    assert seconds <= 1.01 * bound or prompt == 2048 // LEAST
    assert seconds >= 0.9 * bound or prompt == 2048 - decodes, "nor are they much shorter"


def test_a_step_has_room_for_some_tokens_however_slow_the_engine_is():
    h = make(64, max_prefill_step_s=0.01)
    h.seconds = linear(1.0, 1.0)
    h.add("cold", ids(200))
    h.step()
    h.step()
    assert [plan.counts for plan in h.plans] == [[64], [4]]
    h.run()


def test_a_stall_is_forgotten_after_a_few_steps():
    h = make(64, max_prefill_step_s=0.1)
    stalls = iter([*[0.0] * 5, 5.0])
    h.seconds = lambda plan: 0.004 * plan.num_tokens + next(stalls, 0.0)
    h.add("cold", ids(800))
    run_until_answered(h, "cold")
    counts = [plan.counts[0] for plan in h.plans]
    assert counts[5] > 20 and counts[6] == 4 and max(counts[7:]) > 20


def test_without_a_limit_in_seconds_only_tokens_count():
    h = make(64, max_prefill_step_s=0)
    h.seconds = linear(1.0, 1.0)
    h.add("cold", ids(200))
    h.run()
    assert [plan.counts[0] for plan in h.plans[:4]] == [64, 64, 64, 8]


# -- vLLM's options ----------------------------------------------------------------------------------------


def test_a_long_prompt_gets_no_more_than_the_threshold_while_there_are_other_requests():
    h = make(64, long_prefill_token_threshold=10)
    h.add("long", ids(200))
    h.step()
    assert h.plans[-1].counts == [64], "it is alone"
    h.add("other", ids(30, 2))
    h.step()
    assert h.plans[-1].counts == [10, 10]
    h.run()


@pytest.mark.parametrize(("most", "partial"), [(1, 1), (2, 2), (None, 4)])
def test_at_most_so_many_prompts_are_computed_in_part(most, partial):
    h = make(30, max_num_partial_prefills=most, long_prefill_token_threshold=8)
    for i in range(5):
        h.add(f"r{i}", ids(40 + i, i))
    h.step()
    assert len(h.plans[-1].slots) == partial
    h.add("short", ids(2, 9))
    h.step()
    assert h.outputs["short"], "it is computed whole"
    h.run()


def test_at_most_so_many_long_prompts_are_computed_in_part():
    h = make(64, max_long_partial_prefills=1, long_prefill_token_threshold=16)
    h.add("long", ids(300))
    h.add("long too", ids(200, 2))
    h.add("short", ids(16, 3))
    h.step()
    assert sorted(h.plans[-1].counts) == [16, 16]
    assert h.outputs["short"]
    h.run()


def test_a_prompt_is_long_from_a_share_of_the_context_on_if_nothing_else_is_said():
    h = make(64, max_long_partial_prefills=1, max_model_len=500)  # 4 % are 20 tokens
    h.add("long", ids(300))
    h.step()
    h.add("long too", ids(60, 2))
    h.step()
    assert h.scheduler.queue.live["long too"].slot < 0
    h.run()


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_prefill_step_s", -0.1, "at least 0"),
        ("long_prefill_token_threshold", -1, "at least 0"),
        ("max_num_partial_prefills", 0, "at least 1, or left out"),
        ("max_long_partial_prefills", 0, "at least 1, or left out"),
    ],
)
def test_a_limit_that_would_stop_all_prompts_is_refused(field, value, limit):
    with pytest.raises(ConfigError, match=rf"{field} must be {limit}, got {value}"):
        EngineConfig(model="", **{field: value})


def test_a_plan_of_decodes_alone_says_nothing_of_prompts():
    h = make(64, max_prefill_step_s=0.05)
    h.add("a", ids(1), max_tokens=30)
    h.seconds = linear(1.0, 0.0)
    h.run()
    h.add("cold", ids(64, 2))
    plan = h.step()
    assert isinstance(plan, StepPlan) and plan.counts == [64]
    h.run()

"""Prompts that another engine computes (decode), and prompts that are computed for another engine (prefill)."""

import msgspec
import pytest

from engine.core.door.inputs import Aborted
from engine.core.engine_stats import stats_of
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.errors import InvalidParameter, Overloaded, PromptTooLong, RequestTimeout
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.prompts_for_others import STUCK_S
from engine.parts.handoffs.remote_prompt import request_for
from engine.wire.remote_request import KVSource, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.fake_handoffs import DecodeHarness, PrefillHarness
from tests.fake_runner import Harness, expected_output

PARAMS = SamplingParams(seed=1, ignore_eos=True)


def ids(count: int, start: int = 1) -> list[int]:
    return [(start + i) % 49 + 1 for i in range(count)]


@pytest.fixture(params=[1, 2], ids=["plain", "overlap"])
def depth(request) -> int:
    return request.param


def only_open(h: DecodeHarness) -> str:
    (handoff_id,) = h.open
    return handoff_id


def test_a_request_that_moves_to_an_engine_without_handoffs_is_computed(depth):
    """The configuration may have changed while replicas are replaced."""
    h = Harness(num_blocks=16, max_model_len=16, depth=depth)
    h.add("a", ids(9), max_tokens=None, kv_source=KVSource("a/1.1", Peer("old", "tcp://127.0.0.1:1", 1)))
    h.run()
    assert h.outputs["a"] == expected_output(ids(9), PARAMS, 16)


# -- decode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_received_prompt_goes_on_as_if_it_had_been_computed_here(length, depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(length), max_tokens=9)
    assert h.step() is None, "nothing is computed here"
    remote_request = h.open[only_open(h)].remote_request
    assert (remote_request.token_ids, remote_request.skip, remote_request.seed, remote_request.attempt) == (
        ids(length),
        0,
        1,
        1,
    )
    h.receive(only_open(h), cached=2)
    assert len(h.outputs["a"]) == 1, "the first token comes before there was any step"
    h.run()
    assert h.plans[0].starts == [length] and h.plans[0].counts == [1]
    assert h.finished["a"].request.prefix.num_cached == 2
    assert h.scheduler.totals.prompt_tokens == length


def test_only_what_is_missing_is_asked_for(depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(13), max_tokens=2)
    h.run()
    h.add("b", ids(13), max_tokens=2)
    h.step()
    handoff = h.open[only_open(h)]
    assert handoff.remote_request.skip == 12 and len(handoff.blocks) == 1
    h.run()
    assert h.finished["b"].request.prefix.num_cached == 12


def test_a_received_prompt_is_in_the_prefix_cache(depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(12), max_tokens=1)
    h.run()
    assert h.finished["a"].delta.finish_reason == "length" and not h.plans, "one token: nothing is computed at all"
    h.policy.replicas = []
    h.add("b", [*ids(12), 7], max_tokens=3)
    h.run()
    assert h.finished["b"].request.prefix.num_cached == 12


def test_stop_tokens_and_logprobs_hold_for_a_received_token():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    (token, *_) = expected_output(ids(5), PARAMS, 64)
    h.add("a", ids(5), max_tokens=9, stop_token_ids=[token])
    h.run()
    assert h.finished["a"].delta.finish_reason == "stop" and h.finished["a"].delta.stop_reason == token


def test_a_failed_handoff_keeps_the_verified_blocks_and_asks_for_the_rest(depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(14), max_tokens=4)
    h.step()
    first = only_open(h)
    h.fail(first, verified_blocks=2)
    assert h.pool.num_used == 0 and h.pool.num_cached == 2
    h.step()
    second = h.open[only_open(h)].remote_request
    assert (second.skip, second.attempt) == (8, 2) and second.handoff_id != first
    h.run()
    assert h.scheduler.totals.recomputed_tokens == 0


def test_after_the_last_attempt_the_prompt_is_computed_here(depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth, max_attempts=2)
    h.add("a", ids(14), max_tokens=4)
    for _ in range(2):
        h.step()
        h.fail(only_open(h))
    h.step()
    assert h.plans[0].counts == [14] and not h.open
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"remote": {"policy": 2}, "local": {"attempts": 1}}


def test_without_retry_the_prompt_is_computed_here(depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(14), max_tokens=4)
    h.step()
    h.fail(only_open(h), verified_blocks=1, retry=False)
    h.step()
    assert (h.plans[0].starts, h.plans[0].counts) == ([4], [10])
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions["local"] == {"failed": 1}


@pytest.mark.parametrize("ends", ["received", "failed"])
def test_an_abort_ends_the_request_at_once_and_frees_its_blocks_when_nothing_writes_into_them(ends, depth):
    h = DecodeHarness(num_blocks=16, max_model_len=64, depth=depth)
    h.add("a", ids(14), max_tokens=4)
    h.step()
    handoff_id = only_open(h)
    h.abort("a")
    assert h.finished["a"].delta.finish_reason == "abort"
    assert h.pool.num_used == 4 and stats_of(h.scheduler).blocks_reserved == 4
    h.add("a", ids(14), max_tokens=4)  # the id is free again
    h.step()
    assert h.cancelled == {handoff_id: 0}
    if ends == "received":
        h.receive(handoff_id)
    else:
        h.fail(handoff_id, verified_blocks=1)
    assert h.pool.num_used == 4
    del h.finished["a"]
    h.run()


def test_a_timeout_while_receiving_ends_the_request_with_its_error():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.add("a", ids(14))
    h.step()
    h.scheduler.apply(Aborted("a", error=RequestTimeout("a", 5.0)), 5.0)
    (event,) = h.scheduler.out.take_events()
    assert event.delta.error.code == "request_timeout"
    assert event.request.state is State.FINISHED
    h.scheduler.check()


def test_the_prefill_request_says_how_much_time_is_left():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.add("a", ids(5))
    clock = h.scheduler.queue.waiting[0].clock
    clock.deadline_at, clock.first_token_by = 7.0, 5.0
    h.scheduler.schedule(now=4.5)
    h._forward()
    asked = h.open[only_open(h)].remote_request
    assert (asked.timeout_s, asked.ttft_slo_s) == (2.5, 0.5)


def test_receiving_takes_neither_slot_nor_budget_and_received_ones_wait_for_a_slot_in_order(depth):
    h = DecodeHarness(num_blocks=64, max_model_len=64, depth=depth, max_num_seqs=1, max_num_batched_tokens=8)
    for i in range(4):
        h.add(f"r{i}", ids(10, 7 * i), max_tokens=3)
    h.step()
    assert len(h.open) == 4
    for handoff_id in reversed(list(h.open)):
        h.receive(handoff_id)
    assert [len(output) for output in h.outputs.values()] == [1] * 4
    assert stats_of(h.scheduler).blocks_reserved == 12
    h.run()
    assert list(h.finished) == ["r0", "r1", "r2", "r3"]
    assert h.scheduler.totals.preemptions == 0


def test_a_running_request_that_needs_blocks_takes_those_of_a_received_one_behind_it(depth):
    h = DecodeHarness(num_blocks=8, max_model_len=32, depth=depth, max_num_seqs=1)
    h.add("first", ids(4), max_tokens=28)
    h.step()
    h.receive(only_open(h))
    h.add("second", ids(15, 9), max_tokens=3)
    h.step()
    h.receive(only_open(h))
    h.run()
    assert h.finished["first"].delta.num_preemptions == 0
    assert h.finished["second"].delta.num_preemptions == 1
    assert h.plans[0].counts == [1]


def test_the_head_of_the_queue_takes_the_blocks_of_a_received_one_behind_it():
    h = DecodeHarness(num_blocks=8, max_model_len=32)
    h.add("first", ids(15), max_tokens=3)
    h.add("second", ids(8, 9), max_tokens=3)
    h.step()
    one, two = h.open
    h.receive(two)
    h.fail(one)  # its blocks are free again, but four and a spare one for the second are too many
    assert [bool(r.tables) for r in h.scheduler.queue.waiting] == [False, True]
    h.add("third", ids(10, 20), max_tokens=3)
    h.run()


def test_a_spare_block_is_kept_for_everyone_who_will_grow():
    h = DecodeHarness(num_blocks=8, max_model_len=32)
    h.add("first", ids(12))
    h.add("second", ids(12, 9))
    h.step()
    assert len(h.open) == 1, "both would fill the pool"
    h.run()
    assert h.scheduler.totals.preemptions == 0


def test_a_received_prompt_starts_in_the_very_step_in_which_the_last_running_request_was_preempted():
    h = DecodeHarness(num_blocks=4, max_model_len=16, max_num_seqs=1, enable_prefix_caching=False)
    h.add("a", ids(5), max_tokens=3)
    h.step()
    h.add("b", ids(4, start=20), max_tokens=12, prefill="local")
    h.step()
    h.receive(only_open(h))
    while not h.scheduler.totals.preemptions:
        plan = h.step()
    assert plan is not None and plan.starts == [5], "the step that preempted `b` computes `a`"
    h.run()
    assert h.outputs["a"] == expected_output(ids(5), h.finished["a"].request.params, 16)


def test_a_request_that_must_be_computed_elsewhere_fails_where_it_cannot_be():
    h = DecodeHarness(num_blocks=8, max_model_len=32, max_attempts=2)
    h.policy.replicas = []
    h.add("a", ids(12), prefill="remote")
    for _ in range(2):
        h.step()
        h.fail(only_open(h))
    assert h.finished["a"].delta.error.code == "engine_unavailable"
    assert not h.plans and not h.scheduler.has_work
    with pytest.raises(InvalidParameter, match="prefill must be auto or local"):
        h.add("b", ids(12), prefill="remote", prompt_logprobs=1)
    with pytest.raises(InvalidParameter, match="prefill must be auto or local"):
        Harness(num_blocks=8, max_model_len=32).add("c", ids(12), prefill="remote")


def test_a_request_may_ask_to_be_computed_here():
    h = DecodeHarness(num_blocks=8, max_model_len=32)
    h.add("a", ids(12), prefill="local")
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"local": {"asked": 1}}


def test_prompts_with_logprobs_stay_here():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.add("a", ids(9), prompt_logprobs=1)
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"local": {"prompt_logprobs": 1}}


def test_a_preempted_request_is_computed_again_here():
    h = DecodeHarness(num_blocks=8, max_model_len=32)
    h.add("a", ids(4), max_tokens=20)
    h.add("b", ids(4, 9), max_tokens=20)
    h.step()
    for handoff_id in list(h.open):
        h.receive(handoff_id)
    h.run()
    assert h.scheduler.totals.preemptions > 0
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {"remote": {"policy": 2}}


# -- prefill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
@pytest.mark.parametrize("caching", [False, True], ids=["", "caching"])
def test_a_prompt_for_another_engine_is_computed_reported_and_held_until_it_is_read(length, caching, depth):
    h = PrefillHarness(
        num_blocks=16, max_model_len=64, depth=depth, max_num_batched_tokens=10, enable_prefix_caching=caching
    )
    h.add_remote_prefill("t", ids(length))
    while "t" not in h.firsts:
        h.step()
    assert h.reports["t"].upto == length
    h.step()
    assert stats_of(h.scheduler).blocks_leased == h.pool.num_used == -(-length // 4)
    h.close("t")
    assert h.pool.num_used == 0 and not h.scheduler.has_work
    assert h.pool.num_cached == (length // 4 if caching else 0)


def test_every_chunk_is_reported_in_full_blocks(depth):
    h = PrefillHarness(num_blocks=16, max_model_len=64, depth=depth, max_num_batched_tokens=10)
    h.add_remote_prefill("t", ids(27), skip=4)
    seen = []
    while "t" not in h.firsts:
        h.step()
        seen.append(h.reports["t"].upto if "t" in h.reports else 0)
    assert sorted(set(seen) - {0}) == [8, 20, 27]
    assert len(h.reports["t"].blocks) == 6
    h.run()


def test_what_prefill_has_cached_is_reported_before_anything_is_computed():
    h = PrefillHarness(num_blocks=16, max_model_len=64)
    h.add_remote_prefill("one", ids(14))
    h.run()
    h.add_remote_prefill("two", ids(14))
    h.plan()
    assert h.reports["two"].upto == 12
    h.commit()
    assert h.firsts["two"].cached == 12
    h.run()


def test_two_prompts_with_one_prefix_share_blocks_and_each_reports_those_that_stay(depth):
    h = PrefillHarness(num_blocks=16, max_model_len=64, depth=depth, max_num_batched_tokens=9)
    h.add_remote_prefill("one", [*ids(14), 40])
    h.add_remote_prefill("two", [*ids(14), 41])
    while len(h.firsts) < 2:
        h.step()
    assert h.reports["one"].blocks[:3] == h.reports["two"].blocks[:3]
    h.run()


def test_computed_prompts_hold_no_slot_but_their_blocks_and_others_wait_for_them():
    h = PrefillHarness(num_blocks=8, max_model_len=32, max_num_seqs=1)
    for i in range(4):
        h.add_remote_prefill(f"t{i}", ids(12, 9 * i))
    h.step()
    h.step()
    assert set(h.firsts) == {"t0", "t1"} and h.step() is None
    h.close("t0", "expired")
    h.step()
    assert "t2" in h.firsts
    h.run()


@pytest.mark.parametrize("when", ["waiting", "half computed", "computed"])
def test_a_prompt_that_is_given_up_keeps_its_blocks_until_they_are_surely_not_read(when, depth):
    h = PrefillHarness(num_blocks=8, max_model_len=32, depth=depth, max_num_batched_tokens=8)
    h.add_remote_prefill("other", ids(4, 30))
    h.add_remote_prefill("t", ids(20))
    if when == "half computed":
        while "t" not in h.reports:
            h.step()
    elif when == "computed":
        while "t" not in h.firsts:
            h.step()
    held = h.pool.num_used
    h.abort("t")
    assert h.refused == {"t": "cancelled"}
    assert h.pool.num_used == held
    while "other" not in h.firsts:
        h.step()
    assert ("t" in h.firsts) == (when == "computed")
    h.close("t", "cancelled")
    h.run()


def test_closing_a_prompt_that_is_being_computed_ends_it(depth):
    h = PrefillHarness(num_blocks=8, max_model_len=32, depth=depth, max_num_batched_tokens=8)
    h.add_remote_prefill("t", ids(20))
    h.step()
    h.close("t", "expired")
    h.run()
    assert not h.firsts


def test_a_prefill_request_that_cannot_be_served_leaves_no_trace():
    h = PrefillHarness(num_blocks=8, max_model_len=32, max_waiting=1)
    with pytest.raises(PromptTooLong):
        h.add_remote_prefill("long", ids(40))
    with pytest.raises(InvalidParameter, match="stop_token_ids"):
        h.add_remote_prefill("unknown token", ids(4), stop_token_ids=[99])
    h.add_remote_prefill("a", ids(4))
    with pytest.raises(Overloaded):
        h.add_remote_prefill("b", ids(4))
    h.run()


def test_a_prompt_for_another_engine_is_never_preempted(depth):
    h = PrefillHarness(num_blocks=9, max_model_len=32, depth=depth, max_num_batched_tokens=2, max_num_seqs=2)
    h.add("own", ids(4), max_tokens=28)
    while not h.outputs["own"]:
        h.step()
    h.add_remote_prefill("t", ids(20, 7))
    h.run()
    assert h.firsts
    assert h.finished["own"].delta.num_preemptions > 0, "it goes itself, since nobody else can"


def test_a_prompt_for_another_engine_that_cannot_grow_waits_and_keeps_the_blocks_that_are_read():
    """The group with a window has too few blocks for both; those of the other group are named already."""
    h = PrefillHarness(num_blocks=60, max_model_len=32, depth=2, windows=(None, 4), blocks=[60, 3], step_tokens=1,
                       max_num_batched_tokens=4, max_num_seqs=3)  # fmt: skip
    h.add_remote_prefill("long", ids(17))
    for _ in range(5):
        h.step()
    h.add_remote_prefill("short", ids(4, 9))
    h.run()
    assert set(h.firsts) == {"long", "short"}
    assert h.scheduler.totals.preemptions == 0


def test_nothing_is_reported_of_a_prompt_that_was_given_up_during_its_last_step():
    h = PrefillHarness(num_blocks=8, max_model_len=32)
    h.add_remote_prefill("t", ids(20))
    h.plan()
    h.abort("t")
    h.commit()
    assert not h.reports and not h.firsts
    h.close("t", "cancelled")
    h.run()


# -- neither -----------------------------------------------------------------------------------------------


def test_tokens_that_another_replica_has_given_count_as_output():
    whole = Harness(num_blocks=16, max_model_len=64)
    whole.add("a", ids(6), max_tokens=10)
    whole.run()
    h = Harness(num_blocks=16, max_model_len=64)
    h.replay("a", ids(6), whole.outputs["a"][:4], max_tokens=10)
    while h.scheduler.has_work:
        h.step()
    assert h.outputs["a"] == whole.outputs["a"][4:]


def test_a_replay_may_be_computed_elsewhere():
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    given = expected_output(ids(6), PARAMS, 64)[:4]
    h.replay("a", ids(6), given, max_tokens=6)
    h.step()
    remote_request = h.open[only_open(h)].remote_request
    assert (remote_request.token_ids, remote_request.num_prompt) == (ids(6) + given, 6)
    h.receive(only_open(h))
    while h.scheduler.has_work:
        h.step()
    assert len(h.outputs["a"]) == 2 and h.finished["a"].delta.finish_reason == "length"


def test_a_replay_with_nothing_left_to_give_is_refused():
    h = Harness(num_blocks=16, max_model_len=64)
    with pytest.raises(
        InvalidParameter, match="max_tokens must be above 3, the number of output tokens that already exist, got 3"
    ):
        h.replay("a", ids(6), [1, 2, 3], max_tokens=3)
    with pytest.raises(InvalidParameter, match=r"num_prompt must be between 1 and the length of the prompt \(3\)"):
        h.replay("a", [], [1, 2, 3], max_tokens=9)


def test_an_engine_without_handoffs_decides_nothing():
    h = Harness(num_blocks=16, max_model_len=64, handoffs=Handoffs())
    h.add("a", ids(6))
    h.run()
    assert h.scheduler.parts[Handoffs].report().prefill_decisions == {}


# -- an engine whose role changes --------------------------------------------------------------------------


def queue_of_prompts(count: int) -> tuple[DecodeHarness, RequestQueue]:
    """An engine that waits for a prompt of its own, and a queue of prompts of others, all of the time 0."""
    h = DecodeHarness(num_blocks=16, max_model_len=64)
    h.scheduler.parts[Handoffs].role = "decode"
    h.add("own", ids(12))
    h.step()
    remote, queue = h.open[only_open(h)].remote_request, RequestQueue(max_num_seqs=1)
    for number in range(count):
        asked = msgspec.structs.replace(remote, handoff_id=f"{number}", decode=Peer("other", "", 1))
        queue.add(asked_for(asked, number))
    return h, queue


def asked_for(remote_request: RemoteRequest, number: int) -> Request:
    request = request_for(remote_request, now=0.0)
    request.order = 0, number
    return request


def test_prompts_of_a_queue_that_moves_are_not_refused_however_long_they_wait():
    h, queue = queue_of_prompts(30)
    for now in range(20):
        queue.run(queue.waiting[0])
        assert not h.scheduler.parts[Handoffs].stuck(queue, float(now))
        queue.remove(queue.running[0])


def test_a_long_prompt_that_is_computed_for_others_keeps_the_next_ones_waiting():
    h, queue = queue_of_prompts(3)
    queue.run(queue.waiting[0])
    assert not any(h.scheduler.parts[Handoffs].stuck(queue, float(now)) for now in range(20))


def test_prompts_of_others_are_refused_if_none_of_them_starts_while_this_engine_waits_for_its_own():
    h, queue = queue_of_prompts(3)
    refused = [len(h.scheduler.parts[Handoffs].stuck(queue, float(now))) for now in range(int(STUCK_S) + 1)]
    assert refused == [0] * int(STUCK_S) + [3]


@pytest.mark.parametrize("why", ["its role is fixed", "it waits for no prompt"])
def test_an_engine_refuses_no_prompt_if(why):
    h, queue = queue_of_prompts(3)
    if why == "its role is fixed":
        h.scheduler.parts[Handoffs].role = None
    else:
        h.receive(only_open(h))
    assert not any(h.scheduler.parts[Handoffs].stuck(queue, float(now)) for now in range(20))


def test_with_stages_too_a_step_that_preempts_its_only_request_starts_the_next():
    h = DecodeHarness(
        num_blocks=24, max_model_len=24, block_size=1, depth=2, stages=2, max_num_seqs=1, scheduling_policy="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    for name, priority in (("later", 1), ("first", 0)):
        h.add(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], priority=priority)
        h.step()
        h.receive(next(iter(h.open)))
    h.run()  # which fails if a step computes nothing although nothing is waited for
    assert h.scheduler.totals.preemptions


def test_nobody_writes_to_a_block_while_a_step_in_flight_may_still_write_there():
    """That step computes one token too many for a sequence that has just ended and given its blocks back."""
    h = DecodeHarness(num_blocks=4, max_model_len=16, depth=2)
    last = expected_output(ids(6), SamplingParams(max_tokens=6, seed=1, ignore_eos=True), 16)[-1]
    h.add("ends", ids(6), stop_token_ids=[last], max_tokens=9)
    h.add("next", ids(12, 9), max_tokens=2)
    reserved = False
    while "next" not in h.finished:
        plan = h.plan()
        reserved = reserved or (
            "ends" in h.finished and bool(h.prepared) and bool(h.scheduler.parts[Handoffs].remote.receiving)
        )
        for handoff_id in list(h.open):
            h.receive(handoff_id)
        if plan is None or len(h.prepared) >= h.depth:
            h.commit()
    assert reserved, "its blocks are given to the next one while a step is in flight"
    h.run()

"""Which states are kept of sequences, and where others go on from them. The fake runner says when a state is not that
which a plan takes it for."""

from __future__ import annotations

import pytest

from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.parts.kv_groups.request_states import StateSnapshot, states_of
from engine.parts.kv_groups.state_cache_manager import StateCacheManager
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.states import NO_STATES, StateStep
from engine.wire.sampling_params import SamplingParams
from tests.fake_runner import Harness

CHUNK = 4


def make(**options) -> Harness:
    return Harness(**{"num_blocks": 100, "max_model_len": 100, "chunk": CHUNK, "block_size": 2, **options})


def tokens(count: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 50 for i in range(count)]


def saved(h: Harness) -> list[int]:
    """Positions at which states were kept, in order."""
    return [save.position for plan in h.plans for save in (plan.record(StateStep) or NO_STATES).saved]


def cached(h: Harness, name: str) -> int:
    return h.finished[name].delta.num_cached_tokens


def answer(h: Harness, name: str, prompt: list[int], **params) -> int:
    """Returns how many tokens of the prompt were cached."""
    h.add(name, prompt, **params)
    h.run()
    return cached(h, name)


def test_the_last_border_of_a_prompt_is_kept():
    h = make()
    assert answer(h, "first", tokens(11), max_tokens=1) == 0
    assert saved(h) == [8]
    assert answer(h, "again", tokens(11), max_tokens=1) == 8


def test_a_prompt_that_ends_at_a_border_still_computes_its_last_token():
    h = make()
    answer(h, "first", tokens(12), max_tokens=1)
    assert saved(h) == [8]
    assert answer(h, "again", tokens(12), max_tokens=1) == 8


def test_where_a_prompt_parts_from_an_earlier_one_is_kept_for_the_third():
    h = make()
    shared = tokens(14)
    answer(h, "first", [*shared, *tokens(11, 1)], max_tokens=1)
    assert answer(h, "second", [*shared, *tokens(11, 2)], max_tokens=1) == 0
    assert saved(h) == [24, 12, 24]
    assert answer(h, "third", [*shared, *tokens(11, 3)], max_tokens=1) == 12


def test_prompts_that_come_together_compute_their_beginning_twice_at_most():
    h = make(max_num_batched_tokens=200)
    for i in range(6):
        h.add(f"{i}", [*tokens(42), *tokens(3, i)], max_tokens=1)
    h.run()
    assert [cached(h, f"{i}") for i in range(6)] == [0, 0, 40, 40, 40, 40]


def test_of_an_answer_the_newest_border_is_kept_in_place_of_the_one_before():
    h = make(num_snapshots=10)
    answer(h, "first", tokens(5), max_tokens=20)
    assert saved(h) == [4, 8, 12, 16, 20, 24]
    assert h.pools[-1].num_cached == 2, "that of the prompt, and the last"
    whole = tokens(5) + h.outputs["first"]
    assert answer(h, "next turn", [*whole, 3], max_tokens=1) == 24


def test_long_sequences_keep_states_at_intervals():
    h = make(num_snapshots=20, snapshot_interval=3, max_num_batched_tokens=100)
    answer(h, "first", tokens(50), max_tokens=1)
    assert saved(h) == [12, 24, 36, 48]
    assert answer(h, "part", tokens(30), max_tokens=1) == 24


def test_a_step_passes_one_wanted_border_at_most():
    h = make(num_snapshots=20, snapshot_interval=1, max_num_batched_tokens=100)
    h.add("a", tokens(14), max_tokens=1)
    counts = []
    while h.scheduler.has_work:
        counts += h.step().counts
    assert counts == [7, 4, 3]
    assert saved(h) == [4, 8, 12]


def test_a_preempted_sequence_goes_on_from_its_newest_border():
    h = make(num_blocks=16, max_model_len=30, num_snapshots=10)
    h.add("a", tokens(6), max_tokens=20)
    h.add("b", tokens(6, 1), max_tokens=20)
    h.run()
    assert h.scheduler.totals.preemptions
    assert any((plan.record(StateStep) or NO_STATES).restored for plan in h.plans)


def test_without_room_fewer_states_are_kept_and_the_tokens_are_the_same():
    h = make(num_snapshots=1, max_num_seqs=4)
    for i in range(8):
        h.add(f"{i}", [*tokens(9), *tokens(4, i)], max_tokens=9)
    h.run()
    assert h.pools[-1].num_cached == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_step_under_way_writes_has_no_name_before_it_has_ended(depth):
    h = make(depth=depth)
    h.add("a", tokens(9), max_tokens=3)
    h.plan()
    assert saved(h) == [8]
    assert h.pools[-1].num_used == 1 and not h.pools[-1].num_cached
    h.abort("a")
    assert not h.pools[-1].num_used and not h.pools[-1].num_cached
    h.run()


def test_without_the_prefix_cache_nothing_is_kept():
    h = make(enable_prefix_caching=False)
    answer(h, "first", tokens(30), max_tokens=9)
    assert saved(h) == []


@pytest.mark.parametrize("caching", [True, False])
def test_another_engine_never_writes_a_snapshot_from_which_the_planned_step_restores(caching):
    kv_cache, snapshots = SingleTypeKVCacheManager(BlockPool(20, 2)), BlockPool(2, CHUNK, enable_prefix_caching=caching)
    states = StateCacheManager(snapshots, kv_cache, interval=0)
    (snapshot,) = snapshots.allocate(1)
    snapshots.cache_block(snapshot, b"hash")
    message = GenerateRequest(request_id="starts", prompt=tokens(9), params=SamplingParams())
    request = Request.create(message, 100, 0.0)
    states_of(request).source, request.computed, request.slot = StateSnapshot(CHUNK, snapshot), CHUNK, 0
    states.add_sequence(request)
    assert snapshots.reserve([], 1) != [snapshot]
    assert not snapshots.can_reserve([], 1)
    assert states.take_states([]) == StateStep([(0, snapshot)], [])
    assert snapshots.can_reserve([], 1), "a later step may be planned with it"

"""Prompts that begin with KV of another engine: every output is what it is without that engine."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from engine.core.door.inputs import CacheCleared
from engine.core.request import State
from engine.parts.kv_fetching.kv_fetching import BRING_SHARE
from tests.engine.core.test_scheduler_machine import SchedulerMachine, prefixes, rests
from tests.engine.parts.test_kv_offloading import TierMachine
from tests.examples import examples
from tests.fake_caches import TIMEOUT_S, CacheHarness, TieredCacheHarness
from tests.fake_tiers import name_of

PROMPT = list(range(1, 22))  # five blocks and a token


def make(**options) -> CacheHarness:
    return CacheHarness(**{"num_blocks": 16, "max_model_len": 32, **options})


def num_computed(harness: CacheHarness) -> int:
    return sum(plan.num_tokens for plan in harness.plans)


def begun(harness: CacheHarness, held: int = 20, **more) -> str:
    """Begin a fetch. Returns the id of its handoff."""
    harness.add("a", PROMPT, held=held, max_tokens=1, **more)
    harness.step()
    (handoff_id,) = harness.open
    return handoff_id


def cached(harness: CacheHarness, name: str = "a") -> int:
    return harness.finished[name].delta.num_cached_tokens


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 8)])
def test_a_prompt_that_another_engine_has_is_not_computed(windows):
    harness = make(windows=windows)
    begun(harness)
    harness.run()
    assert (num_computed(harness), cached(harness)) == (1, 20)
    assert (harness.fetching.fetches, harness.fetching.fetched_tokens) == ({"received": 1}, 20)


def test_a_recurrent_state_comes_from_the_last_border():
    harness = make(chunk=8)
    begun(harness)
    harness.run()
    assert (num_computed(harness), cached(harness)) == (5, 16)


def test_only_what_is_missing_is_fetched():
    harness = make()
    harness.add("first", PROMPT[:9], max_tokens=1)
    harness.run()
    handoff = harness.open[begun(harness)]
    assert (handoff.remote_request.skip, len(handoff.blocks)) == (8, 3)
    harness.run()


@pytest.mark.parametrize("held", [0, 3, 8])
def test_a_short_prefix_is_computed(held):
    harness = make(min_tokens=12)
    harness.add("a", PROMPT, held=held, max_tokens=1)
    harness.run()
    assert not harness.fetching.fetches


def test_a_part_of_what_was_expected_is_used():
    harness = make()
    harness.receive(begun(harness), blocks=3)
    harness.run()
    assert (cached(harness), harness.fetching.fetched_tokens) == (12, 12)


@pytest.mark.parametrize("came", [0, 2, 5])
def test_blocks_of_a_fetch_that_fails_are_used_as_far_as_they_are_proven(came):
    harness = make()
    harness.fail(begun(harness), came)
    harness.run()
    assert (cached(harness), harness.fetching.fetches) == (4 * came, {"failed": 1})
    assert not harness.open, "it is asked once"


def test_after_the_deadline_the_fetch_is_given_up():
    harness = make()
    handoff_id = begun(harness)
    harness.now += TIMEOUT_S
    harness.step()
    assert harness.cancelled == {handoff_id}
    assert harness.scheduler.queue.live["a"].state is State.LOADING_KV, "its blocks may still be written"
    harness.fail(handoff_id, 1)
    harness.run()
    assert cached(harness) == 4


def test_a_request_waits_for_blocks_that_come_for_another():
    harness = make()
    handoff_id = begun(harness)
    harness.add("b", [*PROMPT, 7], held=20, max_tokens=1)
    harness.step()
    assert [request.request_id for request in harness.fetching.keeps()] == ["a", "b"]
    assert list(harness.open) == [handoff_id]
    harness.run()
    assert num_computed(harness) == 1 + 2


def test_others_are_computed_while_a_request_waits():
    harness = make()
    begun(harness)
    harness.add("other", [30, 31], max_tokens=2)
    while "other" not in harness.finished:
        harness.step()
    assert harness.open
    harness.run()


def test_what_comes_for_a_request_that_has_ended_is_cached():
    harness = make()
    handoff_id = begun(harness)
    harness.abort("a")
    harness.receive(handoff_id)
    harness.add("again", PROMPT, max_tokens=1)
    harness.run()
    assert cached(harness, "again") == 20


def test_nothing_is_cached_that_was_fetched_before_the_cache_was_emptied():
    harness = make()
    handoff_id = begun(harness)
    harness.scheduler.apply(CacheCleared(), harness.now)
    harness.receive(handoff_id)
    harness.run()
    assert (cached(harness), harness.fetching.fetched_tokens) == (0, 0)


def test_the_cheaper_way_is_taken_and_explained():
    harness = make()
    times, link = harness.fetching._times, harness.fetching.link_cost
    times._prompt_s, times._prompt_tokens = 1.0, 100.0
    for mib in (1, 2):
        link.observe(mib, 0.1 * mib)
    harness.add("a", PROMPT, held=20, max_tokens=1)
    harness.run()
    assert harness.fetching.fetches == {"costs_more": 1}
    what = "20 tokens of there to be computed here: fetching 5.0 MiB takes about 0.5 s, computing 0.2 s"
    assert what in [event.what for event in harness.timelines["a"]]
    times._prompt_s = 10.0
    harness.add("b", PROMPT[1:], held=16, max_tokens=1)
    harness.run()
    assert harness.fetching.fetches == {"costs_more": 1, "received": 1}
    what = "16 tokens of there to be fetched: fetching 4.0 MiB takes about 0.4 s, computing 1.6 s"
    assert what in [event.what for event in harness.timelines["b"]]


# -- others fetch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 8)])
def test_blocks_that_others_read_are_not_evicted(windows):
    harness = make(num_blocks=10, windows=windows)
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    harness.ask("theirs", PROMPT)
    assert harness.held["theirs"].upto == 20
    for start in range(22, 46, 6):
        harness.add(f"other {start}", list(range(start, start + 6)), max_tokens=4)
    while len(harness.finished) < 5:
        harness.step()
    harness.run()
    assert not harness.fetching.moving


def test_of_one_group_a_part_is_held():
    harness = make()
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    harness.ask("theirs", [*PROMPT[:12], 40, 41, 42, 43], skip=1)
    assert (harness.held["theirs"].upto, len(harness.held["theirs"].blocks)) == (12, 2)
    harness.run()


@pytest.mark.parametrize(
    ("windows", "prompt", "fingerprint", "reason"),
    [
        ((None,), [40, 41, 42, 43], "print", "group 0 has only 0 of 1 blocks"),
        ((None, 8), [*PROMPT[:12], 40, 41, 42, 43], "print", "group 0 has only 3 of 4 blocks"),
        ((None,), PROMPT, "other", "fingerprint other is not that of this engine (print)"),
        ((None,), PROMPT[:3], "print", "no blocks are named"),
    ],
)
def test_what_cannot_be_fetched_is_refused(windows, prompt, fingerprint, reason):
    harness = make(windows=windows)
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    harness.ask("theirs", prompt, fingerprint=fingerprint)
    assert harness.refused == {"theirs": reason}


def test_no_more_than_half_of_the_cache_is_held_for_others():
    harness = make(num_blocks=16)
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    harness.ask("one", PROMPT)
    harness.ask("two", PROMPT)
    assert harness.refused == {"two": "5 blocks of group 0 are held for other engines already"}
    harness.run()


def in_a_tier(**options) -> TieredCacheHarness:
    """A cache that has no block of PROMPT, above a tier that has all."""
    harness = TieredCacheHarness(**{"num_blocks": 16, "max_model_len": 32, "disk_blocks": 100, **options})
    harness.add("a", PROMPT, max_tokens=1)
    harness.run()
    harness.scheduler.kv_cache.clear_cache()
    return harness


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 8)])
@pytest.mark.parametrize("tier", [{}, {"disk_blocks": 0, "host_slots": 9}, {"disk_blocks": 0, "store_blocks": 99}])
def test_others_fetch_what_only_a_tier_has(windows, tier):
    harness = in_a_tier(windows=windows, **tier)
    harness.ask("theirs", PROMPT)
    assert not harness.held and not harness.refused
    harness.pass_time()
    (number,) = harness.moving
    harness.progress(number)
    harness.take_answers()
    harness.step()
    assert harness.held["theirs"].upto == 20
    harness.run()


def test_one_load_serves_all_who_ask():
    harness = in_a_tier()
    harness.ask("theirs", PROMPT)
    harness.ask("another's", PROMPT[:13])
    harness.add("own", PROMPT, max_tokens=1)
    harness.step()
    (number,) = harness.moving
    harness.progress(number)
    harness.take_answers()
    harness.step()
    assert {name: held.upto for name, held in harness.held.items()} == {"theirs": 20, "another's": 12}
    harness.run()
    assert cached(harness, "own") == 20


@pytest.mark.parametrize(("lost", "upto"), [(0, None), (3, 12)])
def test_a_block_that_its_tier_has_lost_is_missing(lost, upto):
    harness = in_a_tier()
    del harness.disk[name_of(0, harness.learn(PROMPT)[lost])]
    harness.ask("theirs", PROMPT)
    for _ in range(4):
        harness.pass_time()
        for number in list(harness.moving):
            harness.progress(number)
        harness.step()
    if upto is None:
        assert harness.refused == {"theirs": "group 0 has only 0 of 5 blocks"}
    else:
        assert harness.held["theirs"].upto == upto
    harness.run()


def test_a_tier_that_takes_longer_than_the_other_engine_waits_has_nothing():
    harness = in_a_tier()
    harness.ask("theirs", PROMPT)
    harness.pass_time()
    harness.now += BRING_SHARE * TIMEOUT_S
    for _ in range(3):
        harness.step()
    assert harness.refused == {"theirs": "group 0 has only 0 of 5 blocks"}
    harness.run()


def test_nothing_is_loaded_for_others_beyond_their_share_of_the_cache():
    harness = in_a_tier(num_blocks=9)
    harness.ask("theirs", PROMPT)
    harness.pass_time()
    assert not harness.moving and "theirs" in harness.refused


class CacheMachine(SchedulerMachine):
    """Blocks come from and go to other engines, late, in part or not at all, and the books balance."""

    harness = CacheHarness
    h: CacheHarness

    def more_options(self, data):
        return {"enable_prefix_caching": True}

    @rule(prefix=prefixes, rest=rests, held=st.integers(1, 24), seed=st.integers(0, 3))
    def add_held(self, prefix, rest, held, seed):
        self.count += 1
        self.h.add(f"r{self.count}", prefix + rest, held=held, seed=seed)

    @precondition(lambda self: self.h.open)
    @rule(data=st.data(), fails=st.booleans(), blocks=st.integers(0, 6))
    def end(self, data, fails, blocks):
        handoff_id = data.draw(st.sampled_from(sorted(self.h.open)))
        if fails:
            self.h.fail(handoff_id, blocks)
        else:
            self.h.receive(handoff_id, blocks or None)

    @rule(prefix=prefixes, rest=rests, skip=st.integers(0, 2))
    def others_ask(self, prefix, rest, skip):
        self.count += 1
        self.h.ask(f"theirs {self.count}", prefix + rest, skip)

    @precondition(lambda self: self.h.held)
    @rule(data=st.data())
    def others_have_read(self, data):
        self.h.close(data.draw(st.sampled_from(sorted(self.h.held))))

    @rule(seconds=st.sampled_from([0.5, TIMEOUT_S]))
    def time_passes(self, seconds):
        self.h.now += seconds

    @rule()
    def clear(self):
        self.h.scheduler.apply(CacheCleared(), self.h.now)


class TieredCacheMachine(CacheMachine, TierMachine):
    """What others ask for comes up from tiers, late, in part or not at all."""

    harness = TieredCacheHarness
    h: TieredCacheHarness


TestCaches = CacheMachine.TestCase
TestTieredCaches = TieredCacheMachine.TestCase
TestCaches.settings = TestTieredCaches.settings = settings(max_examples=examples(50), stateful_step_count=30)

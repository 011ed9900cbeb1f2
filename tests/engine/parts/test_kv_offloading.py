"""Tiers below the cache of a scheduler: blocks go down and come up, and every output is what it is without them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from engine.core.door.inputs import Aborted, CacheCleared
from engine.core.engine_stats import load_of, stats_of
from engine.core.request import State
from engine.errors import EngineError, Overloaded
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import HandoffWentOn, MovesAsked
from engine.parts.kv_tiers.tier import REST_S
from engine.parts.kv_tiers.tier_writer import WRITE_S
from engine.wire.handoff import Failed
from engine.wire.remote_request import KVSource, Peer
from tests.engine.core.test_scheduler_machine import SchedulerMachine
from tests.examples import examples
from tests.fake_tiers import TIMEOUT_S, TierHarness

PROMPT = list(range(1, 21))  # five blocks


def make(**options) -> TierHarness:
    return TierHarness(**{"num_blocks": 8, "max_model_len": 32, "disk_blocks": 100, **options})


def stored(harness: TierHarness, name: str = "first", prompt: list[int] = PROMPT) -> None:
    """Compute a prompt, and let its blocks go down."""
    harness.add(name, prompt, max_tokens=4)
    harness.run()


def evicted(harness: TierHarness) -> None:
    harness.scheduler.kv_cache.clear_cache()


def with_evicted(**options) -> TierHarness:
    """Return an engine that has the blocks of PROMPT in its tiers only."""
    harness = make(**options)
    stored(harness)
    evicted(harness)
    return harness


def cached(harness: TierHarness, name: str) -> int:
    return next(event.delta.num_cached_tokens for event in [harness.finished[name]])


@pytest.mark.parametrize("tiers", [{"disk_blocks": 100}, {"host_slots": 100, "disk_blocks": 0}, {"host_slots": 2}])
def test_a_prompt_whose_blocks_were_evicted_is_not_computed_again(tiers):
    harness = with_evicted(**tiers)
    harness.add("again", [*PROMPT, 7], max_tokens=4)
    before = len(harness.plans)
    harness.run()
    assert sum(plan.num_tokens for plan in harness.plans[before:]) == 1 + 3, (
        "one token of the prompt, three of the answer"
    )


def test_the_answer_of_a_turn_comes_up_with_its_prompt():
    harness = with_evicted()
    harness.add("next turn", PROMPT + harness.outputs["first"] + [9, 9, 9], max_tokens=2)
    before = len(harness.plans)
    harness.run()
    # the last token of an answer has no KV, so the block that ends with it is not full
    assert sum(plan.num_tokens for plan in harness.plans[before:]) == 4 + 3 + 1


def test_others_are_computed_while_a_request_waits_for_its_blocks():
    harness = with_evicted()
    harness.add("waits", [*PROMPT, 7])
    harness.add("other", [30, 31], max_tokens=2)
    assert harness.step() is not None
    assert harness.scheduler.queue.live["waits"].state is State.LOADING_KV
    while "other" not in harness.finished:
        harness.step()
    harness.run()


def test_a_request_waits_for_blocks_that_come_for_another():
    harness = with_evicted(num_blocks=16)
    for name in ("one", "two"):
        harness.add(name, [*PROMPT, 7], max_tokens=1)
    harness.step()
    assert len(harness.offloading.keeps()) == 2
    assert len(harness.moving) == 1
    harness.run()


def test_after_the_deadline_the_prompt_is_computed_and_late_blocks_are_cached():
    harness = with_evicted(num_blocks=16)
    harness.add("late", [*PROMPT, 7], max_tokens=1)
    harness.step()
    (number,) = harness.moving
    harness.write(number, 0)
    harness.now += TIMEOUT_S + 1
    harness.run()
    stats = harness.offloading.report()
    assert stats.tiers["disk"].errors == {"deadline": 5}
    assert stats.hit_tokens == 0


def test_a_block_that_cannot_be_read_is_computed_and_forgotten():
    harness = with_evicted()
    lost = next(iter(harness.disk))  # tails go down first
    del harness.disk[lost]
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    harness.run()
    assert harness.offloading.report().tiers["disk"].errors == {"read": 1}
    assert lost in harness.disk, "the end of this request stored it again"


def test_a_full_disk_is_left_alone_for_a_while():
    harness = make()
    harness.add("first", PROMPT, max_tokens=4)
    while not harness.moving:
        harness.step()
    for _ in range(2):
        (number,) = harness.moving
        harness.progress(number, failing=lambda count: range(count))
    harness.run()
    stats = harness.offloading.report().tiers["disk"]
    assert stats.errors == {"write": 1}
    assert stats.blocks == 0 and not harness.disk
    harness.now += REST_S + 1
    stored(harness, "second", [*PROMPT, 5])
    assert harness.offloading.report().tiers["disk"].blocks


def test_a_hit_that_is_too_short_is_computed():
    harness = with_evicted(min_tokens=21)
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    harness.run()
    assert harness.offloading.report().hit_tokens == 0


def test_a_slow_disk_is_used_only_where_computing_is_slower():
    harness = make()
    times, tier = harness.offloading._times, harness.offloading.tiers[0]
    tier.cost.observe(1e-5, 1.0)
    for per_token, loaded in ((0.001, 0), (1.0, 20)):
        times._prompt_s, times._prompt_tokens = per_token, 1.0
        name = f"costs {per_token} s"
        stored(harness, f"before it {name}")
        evicted(harness)
        harness.add(name, [*PROMPT, 7], max_tokens=1)
        harness.run()
        assert harness.offloading.report().hit_tokens == loaded


def test_a_request_that_leaves_while_its_blocks_come_leaves_them_to_others():
    harness = with_evicted()
    harness.add("leaves", [*PROMPT, 7])
    harness.step()
    harness.abort("leaves")
    harness.drain()
    assert harness.pool.num_cached == 5 and not harness.pool.num_used


def test_a_request_that_waits_for_its_blocks_moves_to_another_engine():
    harness = with_evicted(handoffs=Handoffs())
    harness.add("moves", [*PROMPT, 7])
    harness.step()
    harness.scheduler.apply(MovesAsked(1), harness.now)
    (event,) = harness.scheduler.out.take_events()
    assert event.delta.error is not None and event.delta.error.code == "moved"
    harness.drain()
    harness.scheduler.check()


def test_another_salt_and_another_adapter_find_nothing():
    harness = with_evicted()
    harness.add("salted", [*PROMPT, 7], max_tokens=1, cache_salt="mine")
    harness.run()
    assert harness.offloading.report().hit_tokens == 0


def test_blocks_that_a_failed_request_has_read_are_forgotten():
    harness = make()
    stored(harness)
    harness.add("fails", [*PROMPT, 7])
    harness.step()
    harness.scheduler.kv_cache.invalidate(harness.scheduler.queue.live["fails"])
    harness.scheduler.apply(Aborted("fails", error=EngineError("fails", "its numbers are not finite")), 0.0)
    harness.drain()
    assert len(harness.disk) == harness.offloading.report().tiers["disk"].blocks == 0


def test_what_was_cleared_is_nowhere():
    harness = make(host_slots=3)
    stored(harness)
    harness.scheduler.apply(CacheCleared(), harness.now)
    harness.drain()
    assert not harness.disk
    assert all(tier.blocks == 0 for tier in harness.offloading.report().tiers.values())


def test_a_request_that_moves_here_waits_for_no_tier():
    """The engine that it left holds its KV for a lease only."""
    peer = Peer("here", "tcp://127.0.0.1:1", 1)
    harness = with_evicted(handoffs=Handoffs(None, peer, "print"))
    harness.add("moves", [*PROMPT, 7], kv_source=KVSource("a/1.1", peer))
    harness.step()
    (opened,) = harness.scheduler.take_messages("engines")
    assert harness.scheduler.queue.live["moves"].state is State.WAITING_FOR_REMOTE_KV
    harness.scheduler.apply(HandoffWentOn(Failed(opened.remote_request.handoff_id, "link", 0, False)), harness.now)
    harness.step()
    assert harness.scheduler.queue.live["moves"].state is State.LOADING_KV, "now the tier is all that is left"
    harness.run()


def test_requests_that_wait_for_blocks_of_a_tier_count_as_waiting():
    harness = with_evicted(max_waiting=1)
    harness.add("waits", [*PROMPT, 7])
    harness.step()
    assert harness.scheduler.queue.live["waits"].state is State.LOADING_KV
    assert stats_of(harness.scheduler).waiting == load_of(harness.scheduler).sequences == 1
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        harness.add("refused", [1, 2])
    harness.run()


def test_what_is_cleared_while_it_moves_is_nowhere():
    harness = with_evicted()
    harness.add("loads", [*PROMPT, 7], max_tokens=1)
    harness.step()
    harness.scheduler.apply(CacheCleared(), harness.now)
    harness.run()
    assert harness.offloading.report().hit_tokens == 0


def with_store(**options) -> TierHarness:
    return make(**{"disk_blocks": 0, "store_blocks": 100, **options})


def test_what_one_engine_has_written_to_the_store_another_reads():
    one, other = with_store(), with_store(num_blocks=16)
    stored(one)
    other.store = one.store
    other.list()
    other.add("again", [*PROMPT, 7], max_tokens=1)
    other.run()
    assert (other.cached_of["again"], other.offloading.report().tiers["store"].read_bytes) == (20, 5)


def test_a_block_that_another_engine_has_deleted_from_the_store_is_computed():
    harness = with_store()
    stored(harness)
    evicted(harness)
    harness.list()
    harness.store.clear()
    harness.list()
    assert harness.offloading.report().tiers["store"].blocks == 0
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    harness.run()
    assert harness.offloading.report().hit_tokens == 0


def test_blocks_of_a_store_that_cannot_be_reached_are_kept_but_not_waited_for():
    harness = with_store()
    stored(harness)
    evicted(harness)
    kept = dict(harness.store)
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    harness.step()
    (number,) = harness.moving
    harness.is_unreachable = True
    harness.progress(number, failing=lambda count: range(count))
    harness.run()
    stats = harness.offloading.report().tiers["store"]
    assert (stats.errors, stats.blocks) == ({"read": 5}, 5)
    assert harness.store == kept
    evicted(harness)
    harness.now += REST_S + 1
    harness.step()
    harness.add("later", [*PROMPT, 7], max_tokens=1)
    harness.run()
    assert harness.cached_of["later"] == 20


def test_a_slow_store_does_not_delay_the_disk():
    harness = make(num_blocks=64, store_blocks=100)
    harness.add("first", PROMPT, max_tokens=4)
    while "first" not in harness.finished:
        harness.step()
    for _ in range(4):
        harness.pass_time()
        harness.take_answers()
        for number in [n for n, moving in harness.moving.items() if moving.command.blocks[0].on_disk]:
            harness.progress(number)
        for number in [n for n, moving in harness.moving.items() if moving.copies is None]:
            harness.progress(number)
    assert (len(harness.disk), len(harness.store)) == (5, 0)
    harness.now += WRITE_S
    harness.pass_time()
    assert harness.offloading.report().tiers["store"].errors == {"deadline": 5}
    assert not harness.offloading.moving, "the blocks on the device are free"


class TierMachine(SchedulerMachine):
    """Blocks go down and come up in any order, late or not at all, and the books balance."""

    harness = TierHarness
    h: TierHarness

    def more_options(self, data):
        sizes = st.sampled_from([(0, 100, 0), (100, 0, 0), (1, 4, 0), (3, 1, 6), (3, 100, 0), (0, 0, 100), (0, 3, 8)])
        names = ("host_slots", "disk_blocks", "store_blocks")
        return {"enable_prefix_caching": True} | dict(zip(names, data.draw(sizes), strict=True))

    @rule(data=st.data(), fails=st.booleans())
    def move(self, data, fails):
        if self.h.moving:
            number = data.draw(st.sampled_from(sorted(self.h.moving)))
            some = st.sets(st.integers(0, 3)) if fails else st.just(set())
            self.h.progress(number, lambda count: {i for i in data.draw(some) if i < count})

    @rule(data=st.data())
    def write_one(self, data):
        loads = [
            n for n, moving in self.h.moving.items() if hasattr(moving.command, "blocks") and "Load" in str(moving)
        ]
        if loads:
            number = data.draw(st.sampled_from(sorted(loads)))
            self.h.write(number, data.draw(st.integers(0, len(self.h.moving[number].command.blocks) - 1)))

    @precondition(lambda self: self.h.written)
    @rule(data=st.data(), deletes=st.booleans())
    def another_engine_writes_or_deletes(self, data, deletes):
        name = data.draw(st.sampled_from(sorted(self.h.written)))
        if deletes:
            self.h.store.pop(name, None)
        else:
            self.h.store[name] = self.h.written[name]

    @precondition(lambda self: self.h.written)
    @rule()
    def list_store(self):
        self.h.list()

    @precondition(lambda self: self.h.written)
    @rule(is_unreachable=st.booleans())
    def lose_store(self, is_unreachable):
        self.h.is_unreachable = is_unreachable

    @rule(seconds=st.sampled_from([0.5, TIMEOUT_S, REST_S]))
    def time_passes(self, seconds):
        self.h.now += seconds

    @precondition(lambda self: self.h.disk)
    @rule(data=st.data())
    def lose(self, data):
        self.h.disk.pop(data.draw(st.sampled_from(sorted(self.h.disk))))

    @rule()
    def evict(self):
        self.h.scheduler.kv_cache.clear_cache()

    @rule()
    def clear(self):
        self.h.scheduler.apply(CacheCleared(), self.h.now)


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=examples(25), stateful_step_count=30)


def test_files_for_which_an_engine_finds_no_room_at_its_start_are_deleted():
    before = make(disk_blocks=20)
    stored(before)

    class Smaller(TierHarness):
        def make_offloading(self, kv_cache):
            offloading = super().make_offloading(kv_cache)
            for name in before.disk:  # before there is a scheduler, as in an engine that starts
                offloading.restore(name, 1, 0.0)
            return offloading

    after = Smaller(num_blocks=32, max_model_len=32, disk_blocks=2)
    after.disk = dict(before.disk)
    assert len(after.disk) == 5
    after.pass_time()
    assert len(after.disk) == after.offloading.report().tiers["disk"].blocks == 2

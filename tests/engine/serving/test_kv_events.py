"""What an engine tells those who subscribe it, against what is so."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from engine.core.engine_stats import load_of
from engine.core.output import Event
from engine.parts.holds.holds import Holds
from engine.serving.kv_events import HEARTBEAT_S, UPDATE_PERIOD_S, KVEventPublisher
from engine.wire.block_hash import BLOCK_HASH_BYTES, block_hashes
from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe
from tests.engine.core.test_scheduler_machine import GROUPS, DecodeMachine
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness
from tests.fake_tiers import TierHarness


def split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + BLOCK_HASH_BYTES] for start in range(0, len(hashes), BLOCK_HASH_BYTES)]


class Reader:
    """A subscriber at `address`. hashes: of the blocks that the engine has. prefilling: requests that it admitted and
    whose prompt is not computed yet. cached: of those that are prefilled."""

    def __init__(self, address: str):
        self.address = address
        self.last_update: EngineUpdate | None = None
        self.hashes: set[bytes] = set()
        self.prefilling: set[str] = set()
        self.cached: dict[str, int] = {}

    def take(self, update: EngineUpdate) -> bool:
        """False if one was lost before."""
        if update.snapshot:
            self.hashes, self.prefilling = set(split(update.stored)), set(update.admitted)
        elif self.last_update is None or update.number != self.last_update.number + 1:
            return False
        else:
            self.hashes = (self.hashes - set(split(update.removed))) | set(split(update.stored))
            self.prefilling |= set(update.admitted)
        self.prefilling -= {request_id for request_id, _ in update.prefilled}
        self.cached.update(update.prefilled)
        self.last_update = update
        return True


class SubscribedHarness(DecodeHarness):
    """now: the publisher's clock."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kv_events = KVEventPublisher("e", self.scheduler)
        self.now = 0.0

    def add(self, name: str, *args, **options) -> None:
        self.kv_events.admitted(name)
        super().add(name, *args, **options)

    def _record(self, event: Event) -> None:
        super()._record(event)
        self.kv_events.prefilled(event)
        if event.delta.finish_reason:
            self.kv_events.finished(event.delta.request_id)

    def send(self, *readers: Reader, after_s: float = UPDATE_PERIOD_S) -> list[EngineUpdate]:
        """What is to be said after some time."""
        self.now += after_s
        sent = []
        for update, addresses in self.kv_events.messages(self.now):
            sent.append(update)
            for reader in readers:
                if reader.address in addresses:
                    assert reader.take(update)
        return sent


def subscribed(**options) -> tuple[SubscribedHarness, Reader]:
    harness, reader = SubscribedHarness(**{"num_blocks": 16, "max_model_len": 64, **options}), Reader("a")
    harness.kv_events.subscribe(Subscribe("a"), harness.now)
    harness.send(reader)
    return harness, reader


class KVEventsMachine(DecodeMachine):
    """Two readers, one of which loses messages, while everything happens to the engine that can."""

    harness: type[Harness] = SubscribedHarness
    groups = tuple(windows for windows in GROUPS if windows[0] is None)  # else first blocks go first (docs/routing.md)
    h: SubscribedHarness

    def __init__(self):
        super().__init__()
        self.readers = {"whole": Reader("whole"), "leaky": Reader("leaky")}
        self.parents: dict[bytes, bytes] = {}

    @rule(lost=st.booleans(), resync=st.booleans())
    def send(self, lost, resync):
        for address in self.readers:
            self.h.kv_events.subscribe(Subscribe(address, resync), self.h.now)
        self.h.now += UPDATE_PERIOD_S
        for update, addresses in self.h.kv_events.messages(self.h.now):
            for address in addresses:
                if address == "whole":
                    assert self.readers[address].take(update)
                elif not lost and not self.readers[address].take(update):
                    self.h.kv_events.subscribe(Subscribe(address, resync=True), self.h.now)
        self.check(self.readers["whole"])

    @rule()
    def see_chains(self):
        for request in [*self.h.scheduler.queue.running, *self.h.scheduler.queue.waiting]:
            chain = request.prefix.hashes
            self.parents.update(zip(chain[1:], chain, strict=False))
        hashes = set(self.h.pool.block_hashes())
        missing = [child for child in hashes if child in self.parents and self.parents[child] not in hashes]
        assert not missing, "a block is there without the one before it: routers search by halves"

    def check(self, reader: Reader) -> None:
        assert reader.hashes == set(self.h.pool.block_hashes())
        assert reader.last_update is not None and reader.last_update.load == load_of(self.h.scheduler)
        assert reader.prefilling <= set(self.h.scheduler.queue.live)

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            for address in self.readers:
                self.h.kv_events.subscribe(Subscribe(address, resync=True), self.h.now)
            self.h.send(*self.readers.values(), after_s=HEARTBEAT_S)
            for reader in self.readers.values():
                self.check(reader)
                assert not reader.prefilling


TestKVEvents = KVEventsMachine.TestCase
TestKVEvents.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_request_is_admitted_once_and_prefilled_with_what_was_cached():
    harness, reader = subscribed()
    for name in ("first", "second"):
        harness.add(name, list(range(1, 11)), max_tokens=2)
        harness.send(reader)
        assert reader.prefilling == {name}
        assert reader.last_update is not None and reader.last_update.load.queued_tokens == 9
        harness.run()
        harness.send(reader)
    assert reader.cached == {"first": 0, "second": 8}
    assert not reader.prefilling


def test_a_snapshot_says_of_every_live_request_whether_its_prompt_is_computed():
    harness, reader = subscribed()
    harness.add("runs", [1, 2, 3, 4, 5], max_tokens=9, prefill="local")
    while not harness.outputs["runs"]:
        harness.step()
    harness.add("waits", [1, 2, 3], prefill="local")
    harness.send(reader)
    late = Reader("late")
    harness.kv_events.subscribe(Subscribe("late"), harness.now)
    harness.send(late)
    assert (late.cached, late.prefilling) == ({"runs": 0}, {"waits"})
    harness.run()


def test_nothing_is_known_of_what_was_cached_for_a_request_that_never_ran():
    harness, reader = subscribed()
    harness.add("a", [1, 2, 3])
    harness.abort("a")
    harness.send(reader)
    assert reader.cached == {"a": -1}


def test_a_block_that_comes_and_goes_between_two_messages_is_not_there():
    harness, reader = subscribed(num_blocks=3, max_model_len=12)
    harness.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    harness.run()
    harness.add("b", [11, 12, 13, 14, 15, 16, 17, 18, 19], max_tokens=1)
    harness.run()
    harness.send(reader)
    assert reader.hashes == set(harness.pool.block_hashes())


def test_updates_come_at_most_every_tenth_of_a_second_and_at_least_every_second():
    harness, reader = subscribed()
    harness.add("a", [1, 2, 3])
    assert [update.number for update in harness.send(reader)] == [1]
    assert harness.kv_events.wait_s(harness.now) == HEARTBEAT_S, "an idle engine sleeps until then"
    harness.step()
    assert harness.send(reader, after_s=UPDATE_PERIOD_S / 2) == []
    assert harness.kv_events.wait_s(harness.now) == pytest.approx(UPDATE_PERIOD_S / 2)
    assert [update.number for update in harness.send(reader, after_s=UPDATE_PERIOD_S * 0.6)] == [2]
    harness.run()
    harness.send(reader)
    assert harness.send(reader, after_s=HEARTBEAT_S / 2) == [], "nothing has changed"
    assert len(harness.send(reader, after_s=HEARTBEAT_S * 0.6)) == 1


def test_without_subscribers_nothing_is_recorded():
    harness, reader = subscribed()
    harness.add("a", list(range(1, 11)), max_tokens=1)
    harness.run()
    observers = len(harness.pool.observers)
    assert harness.send(reader, after_s=SUBSCRIPTION_S + 1) == []
    harness.add("b", list(range(11, 21)), max_tokens=1)
    harness.run()
    assert len(harness.pool.observers) == observers - 1
    assert harness.kv_events.wait_s(harness.now) is None
    harness.kv_events.subscribe(Subscribe("a"), harness.now)
    (update,) = harness.send(reader)
    assert update.snapshot and reader.hashes == set(harness.pool.block_hashes())
    assert not update.prefilled, "what was before it subscribed is over"


def test_a_subscriber_that_renews_gets_no_second_snapshot_unless_it_asks():
    harness, reader = subscribed()
    harness.kv_events.subscribe(Subscribe("a"), harness.now)
    assert all(not update.snapshot for update in harness.send(reader, after_s=HEARTBEAT_S))
    harness.kv_events.subscribe(Subscribe("a", resync=True), harness.now)
    assert any(update.snapshot for update in harness.send(reader))


def test_a_snapshot_says_how_much_of_a_prefix_is_needed_where_all_layers_have_a_window():
    needed = []
    for windows in ((None,), (None, 8), (8,), (9, 30), (1,)):
        _, reader = subscribed(windows=windows)
        assert reader.last_update is not None
        needed.append(reader.last_update.window_blocks)
    assert needed == [0, 0, 2, 2, 1]


def test_holds_are_told_when_they_begin_and_end_and_to_those_who_come_late():
    harness = SubscribedHarness(num_blocks=16, max_model_len=32, held_share=0.5)
    harness.policy.replicas = []  # computed here
    early, late = Reader("early"), Reader("late")
    harness.kv_events.subscribe(Subscribe("early"), harness.now)
    assert [update.held for update in harness.send(early)] == [b""]
    prompt = list(range(1, 13))
    harness.add("held", prompt, max_tokens=2, hold=[(9, 100.0)])
    while "held" not in harness.finished:
        harness.step()
    (end,) = harness.scheduler.parts[Holds].ends
    assert end == split(block_hashes(prompt, harness.config.block_size))[1]
    assert [update.held for update in harness.send(early)] == [end]
    harness.add("other", [40], max_tokens=1)
    while "other" not in harness.finished:
        harness.step()
    assert [update.held for update in harness.send(early)] == [None]
    harness.kv_events.subscribe(Subscribe("late"), harness.now)
    assert [update.held for update in harness.send(late, after_s=0)] == [end]
    harness.scheduler.parts[Holds].cleared()
    assert [update.held for update in harness.send(early)] == [b""]


def test_a_block_that_has_come_and_gone_since_the_last_update_is_announced_if_a_tier_has_it():
    """Seed 10 of tests.days."""
    harness, reader = TierHarness(num_blocks=8, max_model_len=32, disk_blocks=100), Reader("r")
    events = KVEventPublisher("e", harness.scheduler)
    events.subscribe(Subscribe("r", resync=True), 0.0)
    assert all(reader.take(update) for update, _ in events.messages(0.0))
    harness.add("first", list(range(1, 21)), max_tokens=4)
    harness.run()
    harness.drain()
    harness.scheduler.kv_cache.clear_cache()
    assert all(reader.take(update) for update, _ in events.messages(UPDATE_PERIOD_S))
    assert reader.hashes == set(harness.offloading.hashes.all()) != set()

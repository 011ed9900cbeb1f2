"""What is published of the prefix cache in vLLM's format, against what is in it."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis.stateful import rule

from engine.core.door.inputs import CacheCleared
from engine.parts.kv_events.block_events import KVEvents
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.wire.block_hash import block_hashes
from engine.wire.parts.kv_events import KVEventBatch
from tests.engine.core.test_scheduler_machine import DecodeMachine, SchedulerMachine
from tests.engine.parts.test_kv_offloading import TierMachine
from tests.examples import examples
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness
from tests.fake_tiers import TierHarness
from tests.kv_event_reader import AllBlocksCleared, BlockRemoved, BlockStored, Mirror, check_chain


class Reader(Mirror):
    """Stands in for the sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    def send(self, events) -> None:
        self.num_batches += 1
        self.take(msgspec.msgpack.encode(KVEventBatch(0.0, events)))

    def close(self) -> None:
        pass


def published(harness: type[Harness]) -> type[Harness]:
    """A harness whose prefix cache is published."""

    class Published(harness):  # type: ignore[misc,valid-type]
        def __init__(self, int_hashes: bool = False, **options):
            super().__init__(**options)
            self.reader = Reader()
            self.kv_events = KVEvents(self.scheduler.kv_cache.groups, self.reader, int_hashes)

        def publish(self) -> None:
            first = len(self.reader.events)
            self.kv_events.step_ended()
            for group, manager in enumerate(self.scheduler.kv_cache.groups):
                assert self.reader.hashes(group) == set(manager.pool.block_hashes())
            for event in self.reader.events[first:]:
                if isinstance(event, BlockStored):
                    check_chain(event, self.config.block_size)

    return Published


def test_a_block_that_a_tier_has_filled_for_another_engine_is_not_published():
    """No request here has its tokens."""
    harness = published(TierHarness)(num_blocks=8, max_model_len=32, disk_blocks=100)
    prompt = list(range(1, 21))
    for name in ("first", "again"):
        harness.add(name, prompt, max_tokens=1)
        harness.run()
        harness.scheduler.kv_cache.clear_cache()
        harness.kv_events.step_ended()
    hashes = block_hashes(prompt, 4)
    wanted = [[hashes[i : i + 16] for i in range(0, len(hashes), 16)]]
    assert harness.offloading.bring(wanted, 1.0, lambda: None, harness.now)
    harness.drain()
    assert len(harness.pool.block_hashes()) == 5
    harness.kv_events.step_ended()
    assert not harness.reader.hashes(0)
    for number in range(3):  # evicts some of them
        harness.add(f"other {number}", [30 + number] * 17, max_tokens=1)
        harness.run()
    evicted = set(wanted[0]) - set(harness.pool.block_hashes())
    harness.add("own", [*prompt, 1], max_tokens=1)
    harness.run()
    harness.kv_events.step_ended()
    assert evicted and evicted <= harness.reader.hashes(0) <= set(harness.pool.block_hashes())


class PublishingRules:
    @rule()
    def publish(self):
        self.h.publish()

    @rule()
    def reset(self):
        self.h.scheduler.apply(CacheCleared(), self.h.now)

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            self.h.publish()


class PublishingMachine(PublishingRules, SchedulerMachine):
    """Windows, recurrent states, drafts, preemption."""

    harness = published(Harness)


class PublishingDecodeMachine(PublishingRules, DecodeMachine):
    """Blocks that other engines send."""

    harness = published(DecodeHarness)


class PublishingTierMachine(PublishingRules, TierMachine):
    """Blocks that come up from tiers, for requests that may be gone."""

    harness = published(TierHarness)


TestPublishing = PublishingMachine.TestCase
TestPublishingDecode = PublishingDecodeMachine.TestCase
TestPublishingTiers = PublishingTierMachine.TestCase
RULES = settings(max_examples=examples(80), stateful_step_count=30)
TestPublishing.settings = TestPublishingDecode.settings = TestPublishingTiers.settings = RULES


def small(**options) -> Harness:
    return published(Harness)(**{"num_blocks": 16, "max_model_len": 64, **options})


def test_blocks_that_follow_each_other_are_one_event_with_their_tokens_and_their_parent():
    h = small()
    h.add("a", list(range(1, 11)), max_tokens=1)
    h.run()
    h.publish()
    (event,) = h.reader.events
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(range(1, 9)) and event.block_size == 4 and event.parent_block_hash is None
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("full_attention", None)
    h.add("b", [*range(1, 9), 21, 22, 23, 24, 25], max_tokens=1)
    h.run()
    h.publish()
    longer = h.reader.events[1]
    assert isinstance(longer, BlockStored)
    assert longer.token_ids == [21, 22, 23, 24] and longer.parent_block_hash == event.block_hashes[1]


def test_a_block_that_comes_and_goes_between_two_steps_is_not_told_of():
    h = small(num_blocks=3, max_model_len=12)
    for name, first in (("a", 1), ("b", 21)):
        h.add(name, list(range(first, first + 9)), max_tokens=1)
        h.run()
    h.publish()
    assert [type(event) for event in h.reader.events] == [BlockStored]
    h.publish()
    assert h.reader.num_batches == 1, "nothing has changed"


def test_evicted_blocks_are_removed_before_new_ones_are_stored_and_a_reset_is_one_event():
    h = small(num_blocks=3, max_model_len=12)
    for name, first in (("a", 1), ("b", 21)):
        h.add(name, list(range(first, first + 9)), max_tokens=1)
        h.run()
        h.publish()
    assert [type(event) for event in h.reader.events[1:]] == [BlockRemoved, BlockStored]
    h.scheduler.apply(CacheCleared(), h.now)
    h.publish()
    assert isinstance(h.reader.events[-1], AllBlocksCleared) and not h.reader.hashes()


def test_integers_are_the_low_64_bits_of_hashes():
    h = small(int_hashes=True)
    h.add("a", list(range(1, 11)), max_tokens=1)
    h.run()
    h.kv_events.step_ended()
    assert h.reader.hashes() == {int.from_bytes(each, "big") % 2**64 for each in h.pool.block_hashes()}


def test_salt_and_adapter_are_told_as_extra_keys():
    h = small(adapters=AdapterSlots(2))
    h.add("a", list(range(1, 11)), max_tokens=1, cache_salt="tenant")
    h.run()
    h.kv_events.step_ended()
    assert h.reader.events[-1].extra_keys == [("tenant",), None]
    assert h.reader.events[-1].lora_name is None

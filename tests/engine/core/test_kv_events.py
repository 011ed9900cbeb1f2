"""What an engine tells those who follow it, against what is so."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from engine.core.kv_events import HEARTBEAT_S, PERIOD_S, KVEventPublisher
from engine.core.scheduler import Event
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.messages import SUBSCRIPTION_S, EngineUpdate, Subscribe
from tests.engine.core.test_scheduler_machine import DecodeMachine
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness


def split(names: bytes) -> list[bytes]:
    return [names[start : start + BLOCK_HASH_BYTES] for start in range(0, len(names), BLOCK_HASH_BYTES)]


class Reader:
    """A follower at `address`. names: of the blocks that the engine has. unsettled: requests that it took and whose
    prompt is not computed yet. cached: of those that are settled."""

    def __init__(self, address: str):
        self.address = address
        self.news: EngineUpdate | None = None
        self.names: set[bytes] = set()
        self.unsettled: set[str] = set()
        self.cached: dict[str, int] = {}

    def take(self, news: EngineUpdate) -> bool:
        """False if one was lost before."""
        if news.snapshot:
            self.names, self.unsettled = set(split(news.stored)), set(news.taken)
        elif self.news is None or news.number != self.news.number + 1:
            return False
        else:
            self.names = (self.names - set(split(news.removed))) | set(split(news.stored))
            self.unsettled |= set(news.taken)
        self.unsettled -= {request_id for request_id, _ in news.settled}
        self.cached.update(news.settled)
        self.news = news
        return True


class FollowedHarness(DecodeHarness):
    """now: the clock of the news."""

    def __init__(self, **options):
        super().__init__(**options)
        self.news = KVEventPublisher("e", self.scheduler)
        self.now = 0.0

    def add(self, name: str, *args, **options) -> None:
        self.news.took(name)
        super().add(name, *args, **options)

    def _record(self, event: Event) -> None:
        super()._record(event)
        self.news.told(event)
        if event.delta.finish_reason:
            self.news.ended(event.delta.request_id)

    def send(self, *readers: Reader, after_s: float = PERIOD_S) -> list[EngineUpdate]:
        """What is to be said after some time."""
        self.now += after_s
        sent = []
        for news, addresses in self.news.messages(self.now):
            sent.append(news)
            for reader in readers:
                if reader.address in addresses:
                    assert reader.take(news)
        return sent


def followed(**options) -> tuple[FollowedHarness, Reader]:
    harness, reader = FollowedHarness(**{"num_blocks": 16, "max_model_len": 64, **options}), Reader("a")
    harness.news.follow(Subscribe("a"), harness.now)
    harness.send(reader)
    return harness, reader


class NewsMachine(DecodeMachine):
    """Two readers, one of which loses messages, while everything happens to the engine that can."""

    harness: type[Harness] = FollowedHarness
    h: FollowedHarness

    def __init__(self):
        super().__init__()
        self.readers = {"whole": Reader("whole"), "leaky": Reader("leaky")}
        self.parents: dict[bytes, bytes] = {}

    @rule(lost=st.booleans(), again=st.booleans())
    def send(self, lost, again):
        for address in self.readers:
            self.h.news.follow(Subscribe(address, again), self.h.now)
        self.h.now += PERIOD_S
        for news, addresses in self.h.news.messages(self.h.now):
            for address in addresses:
                if address == "whole":
                    assert self.readers[address].take(news)
                elif not lost and not self.readers[address].take(news):
                    self.h.news.follow(Subscribe(address, again=True), self.h.now)
        self.check(self.readers["whole"])

    @rule()
    def see_chains(self):
        for request in [*self.h.scheduler.running, *self.h.scheduler.waiting]:
            chain = request.block_hashes
            self.parents.update(zip(chain[1:], chain, strict=False))
        names = set(self.h.pool.names())
        missing = [child for child in names if child in self.parents and self.parents[child] not in names]
        assert not missing, "a block is there without the one before it: routers search by halves"

    def check(self, reader: Reader) -> None:
        assert reader.names == set(self.h.pool.names())
        assert reader.news is not None and reader.news.load == self.h.scheduler.load()
        assert reader.unsettled <= set(self.h.scheduler.live_ids)

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            for address in self.readers:
                self.h.news.follow(Subscribe(address, again=True), self.h.now)
            self.h.send(*self.readers.values(), after_s=HEARTBEAT_S)
            for reader in self.readers.values():
                self.check(reader)
                assert not reader.unsettled


TestNews = NewsMachine.TestCase
TestNews.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_request_is_taken_once_and_settled_with_what_was_cached():
    harness, reader = followed()
    for name in ("first", "second"):
        harness.add(name, list(range(1, 11)), max_tokens=2)
        harness.send(reader)
        assert reader.unsettled == {name}
        assert reader.news is not None and reader.news.load.queued_tokens == 9
        harness.run()
        harness.send(reader)
    assert reader.cached == {"first": 0, "second": 8}
    assert not reader.unsettled


def test_a_request_that_never_ran_is_settled_as_one_of_which_nothing_is_known():
    harness, reader = followed()
    harness.add("a", [1, 2, 3])
    harness.abort("a")
    harness.send(reader)
    assert reader.cached == {"a": -1}


def test_a_block_that_comes_and_goes_between_two_messages_is_not_there():
    harness, reader = followed(num_blocks=3, max_model_len=12)
    harness.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    harness.run()
    harness.add("b", [11, 12, 13, 14, 15, 16, 17, 18, 19], max_tokens=1)
    harness.run()
    harness.send(reader)
    assert reader.names == set(harness.pool.names())


def test_news_come_at_most_every_tenth_of_a_second_and_at_least_every_second():
    harness, reader = followed()
    harness.add("a", [1, 2, 3])
    assert [news.number for news in harness.send(reader)] == [1]
    harness.step()
    assert harness.send(reader, after_s=PERIOD_S / 2) == []
    assert harness.news.wait_s(harness.now) == pytest.approx(PERIOD_S / 2)
    assert [news.number for news in harness.send(reader, after_s=PERIOD_S * 0.6)] == [2]
    harness.run()
    harness.send(reader)
    assert harness.send(reader, after_s=HEARTBEAT_S / 2) == [], "nothing has changed"
    assert len(harness.send(reader, after_s=HEARTBEAT_S * 0.6)) == 1


def test_where_nobody_follows_nothing_is_recorded():
    harness, reader = followed()
    harness.add("a", list(range(1, 11)), max_tokens=1)
    harness.run()
    assert harness.pool.has_changes
    assert harness.send(reader, after_s=SUBSCRIPTION_S + 1) == []
    harness.add("b", list(range(11, 21)), max_tokens=1)
    harness.run()
    assert not harness.pool.has_changes
    assert harness.news.wait_s(harness.now) is None
    harness.news.follow(Subscribe("a"), harness.now)
    (news,) = harness.send(reader)
    assert news.snapshot and reader.names == set(harness.pool.names())
    assert not news.settled, "what was before it followed is over"


def test_a_follower_that_renews_gets_no_second_snapshot_unless_it_asks():
    harness, reader = followed()
    harness.news.follow(Subscribe("a"), harness.now)
    assert all(not news.snapshot for news in harness.send(reader, after_s=HEARTBEAT_S))
    harness.news.follow(Subscribe("a", again=True), harness.now)
    assert any(news.snapshot for news in harness.send(reader))

"""Cached prefixes by how many requests began with them."""

from __future__ import annotations

from engine.core.door.inputs import CacheCleared
from engine.parts.kv_fetching import prefix_counter
from engine.parts.kv_fetching.prefix_counter import PrefixCounter
from tests.fake_runner import Harness


def ids(count: int, start: int) -> list[int]:
    return [(start + i) % 49 + 1 for i in range(count)]


class Counted:
    """A scheduler, whose requests are counted as an engine's server counts them."""

    def __init__(self, num_blocks: int = 64):
        self.harness = Harness(num_blocks=num_blocks, max_model_len=128, block_size=4)
        self.counter = PrefixCounter(self.harness.scheduler.kv_cache, ranks=2)
        self._count = 0

    def ask(self, prompt: list[int], **options) -> None:
        name = f"r{self._count}"
        self._count += 1
        self.harness.add(name, prompt, max_tokens=2, **options)
        self.harness.run()
        self.counter.observe(self.harness.finished[name].request)

    def found(self, limit: int = 10) -> list[tuple[list[int], int]]:
        return [(prefix.token_ids, prefix.uses) for prefix in self.counter.hottest(limit)]


def test_the_prefixes_with_which_most_requests_began_come_first():
    counted = Counted()
    for start, times in ((1, 3), (20, 5)):
        for _ in range(times):
            counted.ask(ids(41, start))
    assert counted.found() == [(ids(40, 20), 4), (ids(40, 1), 2)], "the first of each has computed it"
    assert counted.found(limit=1) == [(ids(40, 20), 4)]


def test_a_prefix_that_is_no_longer_cached_is_not_named():
    counted = Counted(num_blocks=16)
    for _ in range(2):
        counted.ask(ids(41, 1))
    assert counted.found()
    counted.harness.scheduler.apply(CacheCleared(), counted.harness.now)
    assert not counted.found()


def test_short_prefixes_are_not_counted_and_salts_are_kept_apart():
    counted = Counted()
    for _ in range(2):
        counted.ask(ids(17, 1))
        counted.ask(ids(41, 1), cache_salt="one")
        counted.ask(ids(41, 1), cache_salt="two")
    assert [prefix.cache_salt for prefix in counted.counter.hottest(9)] == ["one", "two"]


def test_the_least_used_prefix_makes_way(monkeypatch):
    monkeypatch.setattr(prefix_counter, "MAX_PREFIXES", 2)
    counted = Counted(num_blocks=128)
    for start, times in ((1, 4), (13, 2), (25, 3)):
        for _ in range(times):
            counted.ask(ids(41, start))
    assert [uses for _, uses in counted.found()] == [3, 2]

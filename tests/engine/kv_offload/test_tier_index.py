"""The books of a tier."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv_offload.tier_index import TierIndex
from tests.examples import examples


def names(text: str) -> list[bytes]:
    return [name.encode() for name in text]


def full(text: str, **options) -> TierIndex:
    index = TierIndex(capacity=len(text), **options)
    for time, name in enumerate(names(text)):
        assert index.add(name, 1, time) == []
        index.written(name)
    return index


def test_the_least_recently_used_goes_first():
    index = full("abc")
    index.touch(names("a"))
    assert index.add(b"d", 1, 0.0) == names("b")
    assert index.add(b"e", 1, 0.0) == names("c"), "what is being written stays"
    assert index.names == names("ade")


def test_a_block_that_is_written_or_read_stays():
    index = full("ab")
    index.begin_read(b"a")
    assert index.add(b"c", 1, 0.0) == names("b")
    assert index.add(b"d", 1, 0.0) is None
    index.end_read(b"a")
    assert index.add(b"d", 1, 0.0) == names("a")


def test_a_block_larger_than_the_tier_evicts_nothing():
    index = full("ab")
    assert index.add(b"c", 3, 0.0) is None
    assert index.names == names("ab")


def test_age_counts_from_the_writing_and_not_from_the_last_use():
    index = full("abc", ttl_s=10)
    index.touch(names("a"))
    assert index.expire(10.5) == names("a")
    assert index.expire(12.0) == names("bc")


class IndexMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 6), slots=st.booleans(), ttl_s=st.sampled_from([None, 5.0]))
    def start(self, capacity, slots, ttl_s):
        self.index, self.slots, self.now = TierIndex(capacity, ttl_s, slots), slots, 0.0
        self.reading: list[bytes] = []
        self.written: set[bytes] = set()

    @rule(name=st.sampled_from(names("abcdefgh")), size=st.integers(1, 3))
    def add(self, name, size):
        if not self.index.knows(name):
            before = set(self.index.names)
            evicted = self.index.add(name, 1 if self.slots else size, self.now)
            assert set(evicted or ()) <= self.written - set(self.reading)
            assert set(self.index.names) == (before - set(evicted) | {name} if evicted is not None else before)
            self.written -= set(evicted or ())

    @rule(name=st.sampled_from(names("abcdefgh")))
    def write(self, name):
        self.index.written(name)
        self.written |= {name} & set(self.index.names)

    @rule(name=st.sampled_from(names("abcdefgh")))
    def read(self, name):
        if self.index.has(name):
            self.index.begin_read(name)
            self.reading.append(name)

    @rule(data=st.data())
    def end_read(self, data):
        if self.reading:
            name = data.draw(st.sampled_from(self.reading))
            self.reading.remove(name)
            self.index.end_read(name)

    @rule(name=st.sampled_from(names("abcdefgh")))
    def drop(self, name):
        assert self.index.drop(name) == (name in self.written and name not in self.reading)
        self.written -= {name} - set(self.reading)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def expire(self, seconds):
        self.now += seconds
        expired = set(self.index.expire(self.now))
        assert expired <= self.written - set(self.reading)
        self.written -= expired

    @rule()
    def clear(self):
        assert set(self.index.clear()) == self.written - set(self.reading)
        self.written &= set(self.reading)

    @invariant()
    def balances(self):
        if hasattr(self, "index"):
            self.index.check()
            assert {name for name in self.index.names if self.index.has(name)} == self.written


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=examples(50), stateful_step_count=30)

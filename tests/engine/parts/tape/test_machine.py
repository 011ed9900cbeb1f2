"""Whatever a scheduler does in the random worlds of test_scheduler_machine.py, its tape replays."""

from __future__ import annotations

import shutil

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import rule

from engine.parts.handoffs.inputs import ReplicasSet
from engine.parts.holds.holds import Holds
from engine.wire.parts.handoffs import PrefillReplica
from tests.engine.core.test_scheduler_machine import GROUPS, PREFIXES, DecodeMachine, PrefillMachine, SchedulerMachine
from tests.engine.parts.tape.taped import (
    CopiedHarness,
    TapedCacheHarness,
    TapedDecodeHarness,
    TapedHarness,
    TapedPrefillHarness,
    TapedTieredCacheHarness,
    TapedTierHarness,
    replay,
    replay_whole,
)
from tests.engine.parts.test_holds import HoldsMachine
from tests.engine.parts.test_kv_fetching import CacheMachine, TieredCacheMachine
from tests.engine.parts.test_kv_offloading import TierMachine
from tests.examples import examples


class Replayed:
    def end(self, found):
        """Called when all requests have ended, with the replay of the whole tape."""

    def teardown(self):
        if hasattr(self, "h"):
            half = replay(self.h.tape)  # requests are live
            assert len(half.scheduler.queue.live) == len(self.h.scheduler.queue.live)
        super().teardown()
        if hasattr(self, "h"):
            found = replay(self.h.tape)
            self.end(found)
            assert found.scheduler.totals == self.h.scheduler.totals
            for pool, own in zip(found.scheduler.kv_cache.pools, self.h.scheduler.kv_cache.pools, strict=True):
                assert pool.ref_counts() == own.ref_counts() and pool.num_cached == own.num_cached


class TapedMachine(Replayed, SchedulerMachine):
    harness = TapedHarness


class CopiedMachine(Replayed, SchedulerMachine):
    harness = CopiedHarness

    def teardown(self):
        if hasattr(self, "h"):
            assert replay_whole(self.h.copy()).num_plans <= replay(self.h.tape).num_plans
        super().teardown()
        if hasattr(self, "h"):
            shutil.rmtree(self.h.shared_root)


class TapedDecodeMachine(Replayed, DecodeMachine):
    harness = TapedDecodeHarness
    groups = tuple(windows for windows in GROUPS if windows != (1,))  # that are too few blocks for some requests

    @rule(there=st.booleans())
    def prefill_pool(self, there):
        self.h.scheduler.apply(ReplicasSet([PrefillReplica(engine_id="p")] if there else []), self.h.now)


class TapedPrefillMachine(Replayed, PrefillMachine):
    harness = TapedPrefillHarness


class TapedCacheMachine(Replayed, CacheMachine):
    harness = TapedCacheHarness


class TapedHoldsMachine(Replayed, HoldsMachine):
    harness = TapedHarness

    def end(self, found):
        if (holds := found.scheduler.parts.get(Holds)) is not None:
            holds.update(self.h.now + 1e9)  # as the end of a run does

    @rule(prefix=st.sampled_from(PREFIXES), client=st.sampled_from(["a", "b"]))
    def read(self, prefix, client):
        self.count += 1
        self.h.add(f"r{self.count}", [*prefix, 1, 2, 3], client=client, max_tokens=2)


class Evicting:
    """Evicts by requests alone: nothing else empties the device's cache from outside of a scheduler."""

    def evict(self):
        pass


class TapedTierMachine(Replayed, Evicting, TierMachine):
    harness = TapedTierHarness


class TapedTieredCacheMachine(Replayed, Evicting, TieredCacheMachine):
    harness = TapedTieredCacheHarness


# few in an ordinary run, in which the tests of these machines run without a tape, too
RULES = settings(max_examples=examples(100, 16), stateful_step_count=40, phases=[Phase.generate])
TestTape = TapedMachine.TestCase
TestCopy = CopiedMachine.TestCase
TestDecodeTape = TapedDecodeMachine.TestCase
TestPrefillTape = TapedPrefillMachine.TestCase
TestCacheTape = TapedCacheMachine.TestCase
TestHoldsTape = TapedHoldsMachine.TestCase
TestTape.settings = TestCopy.settings = TestDecodeTape.settings = TestPrefillTape.settings = RULES
TestTierTape = TapedTierMachine.TestCase
TestTieredCacheTape = TapedTieredCacheMachine.TestCase
TestHoldsTape.settings = TestCacheTape.settings = TestTierTape.settings = TestTieredCacheTape.settings = RULES

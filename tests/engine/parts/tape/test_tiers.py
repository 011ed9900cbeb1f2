"""The tape of a scheduler with tiers: what they answer, and when."""

from __future__ import annotations

import msgspec
import pytest

from cluster.lab.tape.replay import Replay
from engine.core.door.inputs import Aborted
from engine.errors import EngineError, RequestTimeout
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.wire.parts.kv_offload import KVOffloadStats
from tests.engine.parts.tape.taped import attach, replay
from tests.engine.parts.test_kv_fetching import PROMPT, in_a_tier
from tests.engine.parts.test_kv_offloading import evicted, make, stored, with_store
from tests.fake_tiers import TIMEOUT_S, TierHarness


def stats(offloading: KVOffloading) -> KVOffloadStats:
    """What no clock but that of the calls has measured."""
    tiers = {name: msgspec.structs.replace(one, gib_s={}) for name, one in offloading.report().tiers.items()}
    return msgspec.structs.replace(offloading.report(), tiers=tiers)


def replayed(harness: TierHarness, tape) -> Replay:
    found = replay(tape)
    assert found.scheduler.totals == harness.scheduler.totals
    assert stats(found.scheduler.parts[KVOffloading]) == stats(harness.offloading)
    assert [p.ref_counts() for p in found.scheduler.kv_cache.pools] == [p.ref_counts() for p in harness.pools]
    return found


def test_a_request_whose_blocks_come_too_late_is_queued_again():
    harness = make(num_blocks=16)
    stored(harness)
    evicted(harness)
    tape = attach(harness)
    harness.add("late", [*PROMPT, 7], max_tokens=1)
    harness.step()
    harness.now += TIMEOUT_S + 1
    (number,) = harness.moving
    harness.step()
    assert "late" in harness.finished and replayed(harness, tape).scheduler.parts[KVOffloading].moving, (
        "the ranks' answer waits"
    )
    assert [answer.number for answer in harness.answers] == [number], "the load was stopped"
    harness.run()
    replayed(harness, tape)


def test_a_machine_that_has_been_up_for_years_has_tapes_with_tiers():
    harness = make(num_blocks=16)
    harness.now += 10 * 365 * 86400.0
    stored(harness)
    tape = attach(harness)
    evicted(harness)
    replayed(harness, tape)


@pytest.mark.parametrize("error", [RequestTimeout("again", 1.0), EngineError("again", "its logits are not finite")])
def test_an_error_forgets_the_blocks_of_a_request_in_the_tiers_again_only_if_they_may_be_wrong(error):
    harness = make(num_blocks=64)
    stored(harness)
    tape = attach(harness)
    harness.add("again", [*PROMPT, 7], max_tokens=9)
    harness.step()
    harness.scheduler.apply(Aborted("again", error=error), harness.now)
    harness.record()
    harness.drain()
    assert bool(harness.disk) == isinstance(error, RequestTimeout)
    replayed(harness, tape)


def test_blocks_that_came_up_for_another_engine_are_held_for_it():
    harness = in_a_tier()
    tape = attach(harness)
    harness.ask("theirs", PROMPT)
    harness.pass_time()
    (number,) = harness.moving
    harness.progress(number)
    harness.take_answers()
    harness.step()
    assert harness.held["theirs"].upto == 20
    assert replayed(harness, tape).scheduler.parts[KVFetching].moving
    harness.run()
    replayed(harness, tape)


def test_what_other_engines_do_to_the_store_is_on_the_tape():
    one = with_store(num_blocks=16)
    one.add("first", PROMPT, max_tokens=4)
    one.run()
    other = with_store(num_blocks=16)
    other.store = one.store
    tape = attach(other)
    other.list()
    other.add("again", [*PROMPT, 7], max_tokens=1)
    while "again" not in other.finished:
        if other.step() is None:
            other.settle()
    assert other.cached_of["again"] == 20
    del other.store[min(other.store)]
    other.list()
    other.step()
    replayed(other, tape)

"""The tape of a scheduler that keeps holds: requests renew them, and an idle engine ends and moves them."""

from __future__ import annotations

from engine.parts.holds.holds import Holds
from tests.engine.parts.tape.taped import TapedHarness, attach, replay
from tests.engine.parts.test_kv_offloading import PROMPT, make
from tests.fake_runner import Harness


def go(harness: Harness) -> None:
    while harness.scheduler.has_work:
        harness.step()


def test_a_request_without_a_mark_renews_the_holds_of_its_client_again():
    harness = TapedHarness(num_blocks=16, held_share=0.5, max_model_len=32)
    harness.add("first", PROMPT, max_tokens=4, hold=[(20, 50.0)], client="alice")
    go(harness)
    harness.now += 40
    harness.add("again", [*PROMPT, 7], max_tokens=4, client="alice")
    go(harness)
    harness.now += 30
    for name, token in (("one", 41), ("two", 42), ("three", 43)):
        harness.add(name, [token] * 24, max_tokens=4)
        go(harness)
    assert len(replay(harness.tape).scheduler.parts[Holds].ends) == len(harness.scheduler.parts[Holds].ends) == 1


def test_an_idle_engine_ends_a_hold_again():
    harness = TapedHarness(num_blocks=16, held_share=0.5, max_model_len=32)
    harness.add("first", PROMPT, max_tokens=4, hold=[(20, 5.0)], client="alice")
    go(harness)
    harness.now += 6
    assert harness.step() is None and not harness.scheduler.parts[Holds].ends
    assert not replay(harness.tape).scheduler.parts[Holds].ends


def test_an_idle_engine_moves_a_hold_to_a_tier_again():
    harness = make(held_share=0.5, num_blocks=16, host_slots=100)
    tape = attach(harness)
    harness.add("first", PROMPT, max_tokens=4, hold=[(20, 50.0)], client="alice")
    go(harness)
    for _ in range(8):
        harness.now += 1.0
        harness.step()
        for number in list(harness.moving):
            harness.progress(number, lambda count, fails=number == 1: [0] if fails else [])
    (hold,) = harness.scheduler.parts[Holds].table.by_end.values()
    assert [tier.name for tier in hold.tiers] == ["host"], "the disk has failed"
    (again,) = replay(tape).scheduler.parts[Holds].table.by_end.values()
    assert [tier.name for tier in again.tiers] == ["host"]

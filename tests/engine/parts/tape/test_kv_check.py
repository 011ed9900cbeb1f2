"""The tape of a scheduler that checks KV: what it checks when, and what becomes of it."""

from __future__ import annotations

import pytest

from cluster.lab.tape.replay import Replay
from engine.parts.kv_check.kv_check import KVCheck
from tests.engine.parts.tape.taped import attach, replay
from tests.engine.parts.test_kv_check import PROMPT, go_on, with_evicted
from tests.fake_checks import CheckedTiers


def replayed(harness: CheckedTiers, tape) -> Replay:
    found = replay(tape)
    assert found.scheduler.totals == harness.scheduler.totals
    assert found.scheduler.parts[KVCheck].report() == harness.check_part.report()
    assert [p.ref_counts() for p in found.scheduler.kv_cache.pools] == [p.ref_counts() for p in harness.pools]
    return found


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_tape_that_begins_before_a_check_or_while_its_block_waits(flips, tokens):
    harness = with_evicted(flips, disk_blocks=100)
    harness.add("again", [*PROMPT, 7], max_tokens=6)
    while tokens and len(harness.outputs["again"]) < tokens:
        go_on(harness)
    tape = attach(harness)
    harness.run()
    harness.rest()
    assert harness.checks["disk"]["different"] == flips
    replayed(harness, tape)
    harness.add("last", [*PROMPT, 7], max_tokens=2)
    harness.run()
    harness.rest()
    replayed(harness, tape)

"""Cached KV from elsewhere is computed again: what is wrong is found, nobody waits for it, and no output differs."""

from __future__ import annotations

import pytest
from hypothesis import settings

from engine.core.engine_stats import stats_of
from engine.core.request import State
from engine.parts.kv_check.kv_check import LAST
from engine.parts.kv_check.messages import BlockPair, KVCheckStats
from engine.wire.handoff import FirstToken, Quarantine, Received
from engine.wire.plan import StepPlan
from tests.engine.parts.test_kv_fetching import PROMPT as LONGER
from tests.engine.parts.test_kv_offloading import PROMPT, TierMachine
from tests.examples import examples
from tests.fake_checks import CheckedCaches, CheckedDecode, CheckedTiers, Flipped, flipped
from tests.fake_handoffs import first_token

RIGHT, WRONG = {"equal": 1, "different": 0}, {"equal": 0, "different": 1}
TIERS = {"host": {"host_slots": 100}, "disk": {"disk_blocks": 100}, "store": {"store_blocks": 100}}


def make(**options) -> CheckedTiers:
    return CheckedTiers(**{"num_blocks": 16, "max_model_len": 32, **options})


def with_evicted(flips: bool, **options) -> CheckedTiers:
    """Return an engine that has the blocks of PROMPT in its tiers only, perhaps with other bits."""
    harness = make(**options)
    harness.add("first", PROMPT, max_tokens=4)
    harness.run()
    harness.scheduler.kv_cache.clear_cache()
    if flips:
        for tier in (harness.host, harness.disk, harness.store):
            tier.update({key: flipped(cells) for key, cells in tier.items()})
    return harness


def go_on(harness: CheckedTiers) -> StepPlan | None:
    """Take a step. What tiers have to do is done if there is none."""
    assert len(harness.plans) < 1000, "no end in sight"
    plan = harness.step()
    if plan is None and not harness.prepared and harness.moving:
        harness.settle()
    return plan


@pytest.mark.parametrize("tier", TIERS)
def test_a_wrong_block_of_a_tier_is_found_in_the_first_step_without_requests(tier):
    harness = with_evicted(True, **TIERS[tier])
    harness.add("again", [*PROMPT, 7], max_tokens=2)
    harness.run()
    assert harness.rest() <= 1
    assert harness.checks == {tier: WRONG}
    assert harness.offloading.report().tiers[tier].errors == {"different": 1}
    assert not harness.pool.block_hashes(), "nobody hits what was wrong, nor what came of it"
    harness.add("last", [*PROMPT, 7], max_tokens=2)
    before = len(harness.plans)
    harness.run()
    assert harness.plans[before].num_tokens == len(PROMPT) + 1, "the tier is not read any more"
    assert harness.offloading.report().tiers[tier].blocks == 0, "nor written"


@pytest.mark.parametrize("tier", TIERS)
def test_a_right_block_stays_and_is_checked_once(tier):
    harness = with_evicted(False, **TIERS[tier])
    harness.add("again", [*PROMPT, 7], max_tokens=2)
    harness.run()
    harness.rest()
    assert harness.checks == {tier: RIGHT}
    assert harness.rest() == 0, "an idle engine rests"
    harness.add("last", [*PROMPT, 7], max_tokens=1)
    before = len(harness.plans)
    harness.run()
    assert harness.plans[before].num_tokens == 1, "all is cached"


@pytest.mark.parametrize("flips", [False, True])
def test_a_prefix_of_another_engine(flips):
    harness = CheckedCaches(num_blocks=16, max_model_len=32)
    harness.fetching._requests.numerics = "bits"
    harness.add("a", LONGER, held=20, max_tokens=1)
    harness.step()
    ((handoff_id, handoff),) = harness.open.items()
    harness._write(handoff, None)
    if flips:
        for block in handoff.blocks:
            for cell in range(4 * block, 4 * block + 4):
                harness.runner.kv[cell] = Flipped(harness.runner.kv[cell])
    del harness.open[handoff_id]
    harness.handle(Received(handoff_id, FirstToken(-1, None, b"", 20, [], "there", "bits")))
    actions = []
    harness.forward = lambda: actions.extend(harness.scheduler.take_messages("engines"))
    harness.run()
    assert harness.rest() <= 1
    assert harness.checks == {"fetch": WRONG if flips else RIGHT}
    assert actions == [Quarantine("there")] * flips


@pytest.mark.parametrize("numerics", ["bits", "other bits", ""])
def test_a_prompt_that_another_engine_computes_is_checked_if_it_has_the_same_bits(numerics):
    harness = CheckedDecode(num_blocks=16, max_model_len=32)
    harness.scheduler.parts[type(harness.scheduler.parts.all[-2])].requests.numerics = "bits"
    harness.add("a", LONGER, max_tokens=2)
    harness.step()
    ((handoff_id, handoff),) = harness.open.items()
    harness._write(handoff, len(LONGER))
    del harness.open[handoff_id]
    first = FirstToken(first_token(handoff.remote_request), None, b"", 0, [], "prefill", numerics)
    harness.handle(Received(handoff_id, first))
    harness.run()
    harness.rest()
    assert harness.checks == ({"handoff": RIGHT} if numerics == "bits" else {})


def test_a_request_that_comes_during_a_check_is_in_the_next_step():
    harness = with_evicted(False, disk_blocks=100, depth=2)
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    while harness.plans[-1].record(BlockPair) is None:
        go_on(harness)
    harness.add("comes", [30, 31, 32], max_tokens=2)
    assert harness.plan().counts == [3], "the check computes no more"
    harness.run()
    assert harness.checks == {"disk": RIGHT}


def test_no_check_begins_while_a_prompt_waits_or_is_computed():
    harness = with_evicted(False, disk_blocks=100, max_num_batched_tokens=8, max_num_seqs=2)
    harness.add("again", [*PROMPT, 7], max_tokens=1)
    for name in ("one", "two", "three"):
        harness.add(name, [30 + len(name), *range(1, 20)], max_tokens=1)
    checked = []
    while harness.scheduler.has_work:
        busy = [r for r in harness.scheduler.queue.live.values() if r.order[0] != LAST]
        plan = go_on(harness)
        if plan is not None and plan.record(BlockPair):
            checked.append([r for r in busy if r.state is not State.FINISHED and r.pending > 1])
    harness.rest()
    assert harness.checks == {"disk": RIGHT} and not any(checked)


def test_a_check_takes_no_more_than_its_share_of_the_tokens():
    harness = make(disk_blocks=100, every=10)
    harness.add("first", PROMPT, max_tokens=4)
    harness.run()
    for number in range(60):
        harness.scheduler.kv_cache.clear_cache()
        harness.add(f"{number}", [*PROMPT, 7], max_tokens=8)
        harness.run()
        harness.rest()
    stats, computed = harness.check_part.report(), sum(plan.num_tokens for plan in harness.plans)
    assert isinstance(stats, KVCheckStats)
    assert stats.checks["disk"]["equal"] >= 10
    assert stats.tokens <= computed / 10 + 4, "and one block"


def test_statistics_do_not_count_checks():
    plain, checked = (make(disk_blocks=100, every=every) for every in (10**9, 1))
    plain.check_part._known.add(("disk", "disk"))
    plain.check_part._owed = 10**9
    for harness in (plain, checked):
        for name in ("first", "again"):
            harness.add(name, [*PROMPT, 7], max_tokens=3)
            harness.run()
            harness.scheduler.kv_cache.clear_cache()
        harness.rest()
    assert checked.checks and not plain.checks
    one, other = (stats_of(harness.scheduler) for harness in (plain, checked))
    for name in ("prompt_tokens", "generation_tokens", "prefix_hit_tokens", "prefix_queried_tokens", "preemptions"):
        assert getattr(one, name) == getattr(other, name)
    assert one.finished["length"] == other.finished["length"] == 2 and not other.finished.get("abort")


def test_what_a_wrong_block_has_led_to_is_not_cached_either():
    harness = with_evicted(True, disk_blocks=100)
    harness.add("again", [*PROMPT, 7], max_tokens=10)
    while not harness.checks:
        go_on(harness)
    assert harness.scheduler.queue.live["again"].num_output < 10, "it still runs"
    harness.run()
    assert not harness.pool.block_hashes()


class CheckedMachine(TierMachine):
    harness = CheckedTiers
    groups = ((None,),)
    h: CheckedTiers

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            self.h.rest()
            assert not any(results["different"] for results in self.h.checks.values())


TestChecked = CheckedMachine.TestCase
TestChecked.settings = settings(max_examples=examples(25), stateful_step_count=30)

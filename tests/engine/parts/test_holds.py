"""Holds: what was granted is never evicted before its end, and what was refused changes nothing."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from engine.core.door.inputs import CacheCleared
from engine.parts.holds import hold_table
from engine.parts.holds.holds import Holds
from engine.parts.holds.inputs import HoldsGiven, HoldsReleased
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.prefix_pins import longest_prefix
from engine.wire.block_hash import block_hashes
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.costs import SequenceCost
from tests.engine.core.test_scheduler_machine import PREFIXES, DecodeMachine, SchedulerMachine, rests
from tests.engine.parts.test_kv_offloading import TierMachine
from tests.examples import examples
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness
from tests.fake_tiers import TierHarness, name_of

PROMPT = list(range(1, 21))  # five blocks of four


def make(**options) -> Harness:
    return Harness(**{"num_blocks": 16, "max_model_len": 32, "held_share": 0.5, **options})


def outcomes(harness: Harness, name: str) -> list[HoldOutcome]:
    return harness.holds_of[name]


def cost_of(harness: Harness, name: str) -> SequenceCost:
    """Return what an ended request has cost."""
    return harness.finished[name].delta.records(SequenceCost)[-1]


def held(harness: Harness, name: str, prompt: list[int] = PROMPT, ttl_s: float = 10.0, **options) -> HoldOutcome:
    """Compute a prompt that its client wants to be held, and return the answer."""
    serve(harness, name, prompt, hold=[(len(prompt), ttl_s)], **options)
    (outcome,) = outcomes(harness, name)
    return outcome


def table_of(harness: Harness) -> hold_table.HoldTable:
    assert isinstance(harness.scheduler.parts[Holds], Holds)
    return harness.scheduler.parts[Holds].table


def on_device(harness: Harness) -> Counter[int]:
    """How many holds have each block of the first group on the device."""
    return table_of(harness).pinned[0]


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 2, **options) -> None:
    """Answer a request."""
    harness.add(name, prompt, max_tokens=max_tokens, **options)
    while name not in harness.finished:
        harness.step()


def serve_from_tiers(harness: TierHarness, name: str, prompt: list[int], **options) -> None:
    """Answer a request, while blocks go down and come up."""
    harness.add(name, prompt, max_tokens=2, **options)
    while name not in harness.finished:
        harness.step()
        harness.drain()


def flood(harness: Harness) -> None:
    """Have every block that may be evicted hold something else."""
    for number in range(3):
        name = f"flood {number} {len(harness.finished)}"
        serve(harness, name, [len(harness.finished)] * 26)


def cached(harness: Harness, prompt: list[int] = PROMPT) -> int:
    """Tokens of a prompt that a request that begins with it would find."""
    hashes = block_hashes(prompt, harness.config.block_size)
    return longest_prefix(harness.scheduler.kv_cache, [hashes[i : i + 16] for i in range(0, len(hashes), 16)]) * 4


def test_held_prompt_is_cached_after_all_else_was_evicted_and_another_is_not():
    harness = make()
    assert held(harness, "held") == HoldOutcome(tokens=20, ttl_s=10.0)
    other = [*range(21, 40), 1]
    serve(harness, "other", other)
    flood(harness)
    assert (cached(harness), cached(harness, other)) == (20, 0)
    serve(harness, "next turn", [*PROMPT, 7, 8])
    assert harness.cached_of["next turn"] == 20
    harness.run()


def test_hold_ends_with_its_time():
    harness = make()
    held(harness, "held")
    harness.now = 9.9
    flood(harness)
    assert cached(harness) == 20
    harness.now = 10.0
    flood(harness)
    assert cached(harness) == 0
    assert harness.scheduler.parts[Holds].report().ended == {"expired": 1}
    harness.run()


@pytest.mark.parametrize(("client", "left"), [("alice", 20), ("bob", 0)])
def test_use_by_its_client_renews_a_hold(client, left):
    harness = make()
    held(harness, "held", client="alice")
    harness.now = 9.0
    serve(harness, "next turn", [*PROMPT, 7], client=client)
    harness.now = 15.0
    flood(harness)
    assert cached(harness) == left
    harness.run()


def test_the_next_request_pays_for_what_a_hold_has_kept():
    kept, plain = (make(num_blocks=32) for _ in range(2))
    for harness in (kept, plain):
        serve(harness, "first", PROMPT, hold=[(20, 10.0)] if harness is kept else None)
        harness.clock += 100.0
        serve(harness, "next turn", [*PROMPT, 7])
        harness.run()
    first, with_hold, without = (
        cost_of(harness, name).kv_gib_s
        for harness, name in ((kept, "first"), (kept, "next turn"), (plain, "next turn"))
    )
    assert with_hold - without == pytest.approx(5 * 100.0, rel=0.01), "five blocks, each of a GiB"
    assert first < 1.0
    assert kept.scheduler.parts[Holds].report().unused_block_s < 0.1


def test_a_hold_that_replaces_another_pays_for_it():
    harness = make(num_blocks=32, max_model_len=64)
    held(harness, "first", PROMPT[:8], hold_name="talk")
    harness.clock += 100.0
    held(harness, "second", PROMPT, hold_name="talk")
    assert cost_of(harness, "second").kv_gib_s == pytest.approx(2 * 100.0, rel=0.01)
    harness.run()


def test_nobody_pays_for_a_hold_that_nobody_has_used():
    harness = make(num_blocks=32)
    held(harness, "held")
    harness.clock += 100.0
    harness.now = 11.0
    serve(harness, "other", [40, 41, 42])
    harness.run()
    assert cost_of(harness, "other").kv_gib_s < 1.0
    harness.scheduler.parts[Holds].update(harness.now)
    harness.check()
    assert harness.scheduler.parts[Holds].report().unused_block_s == pytest.approx(5 * 100.0, rel=0.01)


def test_prompt_that_reads_only_a_part_of_a_hold_does_not_renew_it():
    harness = make()
    held(harness, "held")
    harness.now = 9.0
    serve(harness, "branch", [*PROMPT[:16], 40, 41, 42, 43, 44])
    harness.now = 11.0
    flood(harness)
    assert cached(harness) == 0
    harness.run()


@pytest.mark.parametrize("name", ["talk", "resp-held"])
def test_client_ends_its_hold_by_the_name_of_the_conversation_or_the_response(name):
    harness = make()
    held(harness, "held", client="alice", hold_name="talk")
    harness.scheduler.apply(HoldsReleased(name, "bob"), harness.now)
    assert harness.scheduler.parts[Holds].report().holds == 1
    harness.scheduler.apply(HoldsReleased(name, "alice"), harness.now)
    assert harness.scheduler.parts[Holds].report().ended == {"released": 1}
    flood(harness)
    assert cached(harness) == 0
    harness.run()


def test_emptying_the_prefix_cache_ends_all_holds():
    harness = make()
    held(harness, "held")
    harness.scheduler.apply(CacheCleared(), harness.now)
    assert cached(harness) == 0
    assert harness.scheduler.parts[Holds].report().ended == {"cleared": 1}
    harness.run()


@pytest.mark.parametrize(
    ("options", "mark", "refusal", "reason"),
    [
        ({}, (3, 10.0), "short", "its 3 tokens are less than a block of 4"),
        ({}, (20, 101.0), "ttl", "its time of 101 s is above max_hold_s (100)"),
        ({"held_share": 0.25}, (20, 10.0), "full", "all holds would keep 5 blocks, the limit is 4"),
        ({"held_share_per_client": 0.2}, (20, 10.0), "client_full",
         "this client's holds would keep 5 blocks, the limit is 3"),
        ({"held_share": 1.0, "num_blocks": 12}, (20, 10.0), "full", "all holds would keep 5 blocks, the limit is 4"),
        ({"held_share": 0.0}, (20, 10.0), "off",
         "this server keeps no holds (max_held_share is 0, or prefix caching is off)"),
        ({"enable_prefix_caching": False}, (20, 10.0), "not_cached",
         "this engine has not kept all KV or state of these tokens"),
    ],
)  # fmt: skip
def test_refused_hold_says_why_and_keeps_nothing(options, mark, refusal, reason):
    harness = make(**options)
    serve(harness, "refused", PROMPT, hold=[mark])
    expected = HoldOutcome(tokens=mark[0], ttl_s=mark[1], refusal=refusal, reason=reason)
    assert outcomes(harness, "refused") == [expected]
    assert not harness.pool.pinned and harness.pool.num_used == 0
    harness.run()


def test_growing_conversation_has_one_hold():
    harness = make(num_blocks=32)
    talk = list(PROMPT[:8])
    for turn in range(4):
        assert held(harness, f"turn {turn}", list(talk), client="alice").refusal is None
        talk += [40 + turn] * 4
    assert harness.scheduler.parts[Holds].report().holds == 1
    assert max(on_device(harness).values()) == 1
    flood(harness)
    assert cached(harness, talk) == 20
    harness.run()


def test_marks_of_one_request_are_holds_of_their_own():
    """As Claude Code marks the system prompt for an hour, and the last turn for five minutes."""
    harness = make(num_blocks=32)
    for turn in range(2):
        prompt = PROMPT[: 12 + 4 * turn]
        serve(harness, f"turn {turn}", prompt, hold=[(8, 60.0), (len(prompt), 5.0)])
    assert [(o.tokens, o.ttl_s) for o in outcomes(harness, "turn 1")] == [(8, 60.0), (16, 5.0)]
    assert harness.scheduler.parts[Holds].report().holds == 2
    harness.now = 6.0
    flood(harness)
    flood(harness)
    assert cached(harness) == 8
    harness.run()


def test_shorter_hold_does_not_cut_a_longer_one_short():
    harness = make()
    held(harness, "long", ttl_s=60.0)
    assert held(harness, "short", ttl_s=5.0).ttl_s == 60.0
    harness.now = 30.0
    flood(harness)
    assert cached(harness) == 20
    harness.run()


def test_request_that_needs_more_than_is_left_preempts_others_but_never_a_hold():
    harness = make(num_blocks=12, held_share=1.0)
    assert held(harness, "held").refusal == "full"
    assert held(harness, "smaller", PROMPT[:16]).refusal is None
    for name in ("one", "two"):
        harness.add(name, [ord(name[0]) % 50] * 8, max_tokens=20)
    while not {"one", "two"} <= harness.finished.keys():
        harness.step()
    assert harness.scheduler.totals.preemptions
    assert cached(harness) == 16
    harness.run()


def test_blocks_that_may_be_infinite_are_held_no_longer():
    harness = make()
    harness.add("broken", PROMPT, hold=[(20, 10.0)])
    while "broken" not in harness.holds_of:
        harness.step()
    request = harness.scheduler.queue.live["broken"]
    harness.commit()
    harness.scheduler.append_tokens(request, [-1], None, 0.0)
    harness.record()
    assert harness.scheduler.parts[Holds].report().ended == {"invalid": 1}
    assert cached(harness) == 0


def test_held_blocks_that_a_failed_request_has_read_are_held_no_longer():
    harness = make()
    held(harness, "held")
    harness.add("broken", [*PROMPT, 7, 8, 9])
    while not (request := harness.scheduler.queue.live["broken"]).num_output:
        harness.step()
    request.in_flight += 1
    harness.scheduler.append_tokens(request, [-1], None, 0.0)
    assert harness.scheduler.parts[Holds].report().ended == {"invalid": 1}


def test_first_token_of_a_request_that_was_preempted_meanwhile_reports_its_holds():
    harness = make()
    harness.add("preempted", PROMPT, max_tokens=3, hold=[(20, 10.0)])
    harness.plan()
    harness.scheduler._blocks._preempt(harness.scheduler.queue.live["preempted"])
    harness.commit()
    assert len(outcomes(harness, "preempted")) == 1
    harness.run()
    assert len(outcomes(harness, "preempted")) == 1


@pytest.mark.parametrize("name", ["one", "another", "resp-one", "resp-another"])
def test_hold_that_two_conversations_ask_for_is_ended_by_neither(name):
    harness = make()
    assert held(harness, "one", hold_name="one").refusal is None
    assert held(harness, "another", hold_name="another").refusal is None
    harness.scheduler.apply(HoldsReleased(name, None), harness.now)
    flood(harness)
    assert cached(harness) == 20
    harness.run()


def test_hold_beyond_the_number_of_holds_is_refused(monkeypatch):
    """Marks of one prompt share its blocks, so the share alone would let a client have a hold for each block."""
    monkeypatch.setattr(hold_table, "MAX_HOLDS_PER_CLIENT", 2)
    monkeypatch.setattr(hold_table, "MAX_HOLDS", 3)
    harness = make()
    serve(harness, "many", PROMPT, client="alice", hold=[(4 * blocks, 10.0) for blocks in (1, 2, 3)])
    assert [outcome.refusal for outcome in outcomes(harness, "many")] == [None, None, "client_full"]
    assert held(harness, "of bob", PROMPT[:4], client="bob").refusal is None
    refused = held(harness, "of carol", PROMPT[:4], client="carol")
    assert (refused.refusal, refused.reason) == ("full", "all clients together have 3 holds, the limit is 3")
    harness.run()


def test_engine_with_windows_holds_the_windows_before_the_mark():
    harness = make(num_blocks=0, windows=(None, 5), blocks=[16, 16], step_tokens=8, max_num_batched_tokens=8)
    serve(harness, "held", PROMPT, hold=[(12, 10.0)])
    assert outcomes(harness, "held") == [HoldOutcome(tokens=12, ttl_s=10.0)]
    assert [len(pinned) for pinned in table_of(harness).pinned] == [3, 1]
    flood(harness)
    assert cached(harness) == 12
    harness.run()


def test_one_of_two_holds_ends_that_keep_no_blocks():
    """A window of one token needs no earlier block."""
    harness = make(num_blocks=0, windows=(1,), blocks=[16], step_tokens=8, max_num_batched_tokens=8)
    serve(harness, "held", PROMPT, hold=[(8, 10.0), (12, 20.0)])
    assert [outcome.refusal for outcome in outcomes(harness, "held")] == [None, None]
    harness.now = 15.0
    harness.step()
    assert harness.scheduler.parts[Holds].report().holds == 1
    harness.run()


def test_engine_with_recurrent_states_holds_the_state_before_the_mark():
    harness = make(num_blocks=16, chunk=4, num_snapshots=6)
    serve(harness, "held", PROMPT, hold=[(10, 10.0)])
    assert outcomes(harness, "held") == [HoldOutcome(tokens=8, ttl_s=10.0)]
    for number in range(8):
        serve(harness, f"other {number}", [number] * 8)
    assert cached(harness) == 8
    harness.run()


def test_prompt_that_another_engine_computed_is_held_here():
    harness = DecodeHarness(num_blocks=16, max_model_len=32, held_share=0.5)
    harness.add("remote", PROMPT, max_tokens=4, hold=[(20, 10.0)])
    while not harness.open:
        harness.step()
    harness.receive(next(iter(harness.open)))
    assert outcomes(harness, "remote") == [HoldOutcome(tokens=20, ttl_s=10.0)]
    harness.run()


def with_tier(**options) -> TierHarness:
    return TierHarness(**{"num_blocks": 14, "max_model_len": 32, "held_share": 0.5, "disk_blocks": 40, **options})


def moved_down(harness: TierHarness) -> None:
    """Let tiers take what holds keep."""
    for _ in range(3):
        harness.step()
        harness.drain()
    assert not on_device(harness)


def fill_tier(harness: TierHarness) -> None:
    for _ in range(8):
        name = f"filler {len(harness.finished)}"
        serve(harness, name, [20 + len(harness.finished)] * 26)
        harness.drain()


def in_tier(harness: TierHarness, prompt: list[int]) -> int:
    """Tokens of a prompt that are cached, or in a tier."""
    hashes, tiers = block_hashes(prompt, 4), harness.offloading.tiers
    names = [hashes[i : i + 16] for i in range(0, len(hashes), 16)]
    return 4 * longest_prefix(
        harness.scheduler.kv_cache,
        names,
        lambda group, each: any(tier.index(group).has(name_of(group, each)) for tier in tiers),
    )


def test_tier_takes_a_hold_and_keeps_it_when_all_else_was_evicted_from_it():
    harness = with_tier()
    for name, start in (("one", 1), ("two", 3), ("three", 5)):  # more than the device could hold
        assert held(harness, name, [start, *PROMPT[1:]]).refusal is None
        moved_down(harness)
    assert harness.scheduler.parts[Holds].report().blocks == 15
    other = [9, *PROMPT[1:]]
    serve(harness, "other", other)
    harness.drain()
    fill_tier(harness)
    assert [in_tier(harness, [start, *PROMPT[1:]]) for start in (1, 3, 5, 9)] == [20, 20, 20, 0]
    serve_from_tiers(harness, "next turn", [*PROMPT, 7])
    assert harness.cached_of["next turn"] == 20
    harness.now = 10.5
    fill_tier(harness)
    assert [in_tier(harness, [start, *PROMPT[1:]]) for start in (3, 5)] == [0, 0]
    harness.run()


def test_held_blocks_are_loaded_even_if_computing_them_would_be_faster():
    harness = with_tier(min_tokens=100)
    for name, hold in (("held", [(20, 10.0)]), ("other", None)):
        serve(harness, name, [len(name), *PROMPT[1:]], hold=hold)
        harness.drain()
    moved_down(harness)
    flood(harness)
    for name in ("held", "other"):
        serve_from_tiers(harness, f"{name} again", [len(name), *PROMPT[1:], 7])
    assert (harness.cached_of["held again"], harness.cached_of["other again"]) == (20, 0)
    harness.run()


def test_the_next_request_pays_for_what_a_tier_has_kept_for_a_hold():
    harness = with_tier()
    held(harness, "held")
    moved_down(harness)
    harness.clock += 100.0 * 2**30  # blocks of the fake tier are of one byte
    serve_from_tiers(harness, "next turn", [*PROMPT, 7])
    assert cost_of(harness, "next turn").tier_gib_s == pytest.approx(5 * 100.0, rel=0.01)
    kept = harness.scheduler.parts[KVOffloading].report().tiers["disk"].gib_s
    assert kept["holds"] == pytest.approx(5 * 100.0, rel=0.01) and kept["cache"] < 200
    harness.run()


def test_hold_beyond_the_share_of_every_tier_is_refused():
    harness = with_tier(disk_blocks=16)
    assert held(harness, "one").refusal is None
    moved_down(harness)
    outcome = held(harness, "two", [9, *PROMPT[1:]])
    assert (outcome.refusal, outcome.reason) == ("full", "all holds would keep 10 blocks, more than 50% of any tier")
    assert harness.scheduler.parts[Holds].report().holds == 1
    harness.run()


def test_hold_whose_file_is_damaged_ends_and_is_computed():
    harness = with_tier()
    held(harness, "held")
    moved_down(harness)
    flood(harness)
    harness.drain()
    del harness.disk[name_of(0, block_hashes(PROMPT, 4)[:16])]
    serve_from_tiers(harness, "next turn", [*PROMPT, 7])
    harness.step()
    assert harness.scheduler.parts[Holds].report().ended == {"lost": 1}
    harness.run()


def test_device_keeps_a_hold_while_no_tier_can():
    harness = with_tier()
    serve(harness, "held", PROMPT, hold=[(20, 10.0)])
    while not harness.moving:
        harness.step()
    for _ in range(2):
        (number,) = harness.moving
        harness.progress(number, failing=lambda count: range(count))
    harness.take_answers()
    flood(harness)
    assert len(on_device(harness)) == 5 and cached(harness) == 20
    harness.run()


OPTIONS = {"num_blocks": 14, "max_model_len": 32, "held_share": 0.5, "disk_blocks": 40}
STORE = {**OPTIONS, "disk_blocks": 0, "store_blocks": 40}
PLACES = pytest.mark.parametrize("options", [OPTIONS, STORE], ids=["disk", "store"])


# -- holds that another engine takes over --------------------------------------------------------------------


def test_a_hold_that_another_engine_takes_over_lasts_as_long_as_was_promised():
    leaving, other, unused = make(), make(), make()
    held(leaving, "held", client="alice", hold_name="talk")
    leaving.now = 4.0
    (given,) = leaving.scheduler.apply(HoldsGiven(8), leaving.now)
    assert (given.token_ids, given.client, given.name, given.response_id) == (PROMPT, "alice", "talk", "resp-held")
    assert (given.ttl_s, given.left_s) == (10.0, 6.0)
    mark = (len(given.token_ids), given.ttl_s, given.left_s)
    for harness in (other, unused):
        serve(harness, "hold", given.token_ids, max_tokens=1, client="alice", hold=[mark], hold_name="talk")
    unused.now = 6.0
    flood(unused)
    assert cached(unused) == 0
    assert outcomes(other, "hold") == [HoldOutcome(tokens=20, ttl_s=10.0)]
    other.now = 5.9
    flood(other)
    assert cached(other) == 20
    serve(other, "next turn", [*PROMPT, 7], client="alice")
    other.now = 15.8
    flood(other)
    assert cached(other) == 20, "each use renews it for its whole time"
    other.now = 15.9
    flood(other)
    assert cached(other) == 0


def test_a_hold_that_arrives_renews_no_other_hold_with_which_its_prompt_begins():
    other = make(held_share=1.0, num_blocks=40)
    held(other, "held", client="alice")
    other.now = 6.0
    longer = [*PROMPT, 7, 8, 9, 10]
    mark = (len(longer), 10.0, 2.0)
    serve(other, "hold", longer, max_tokens=1, client="alice", hold=[mark], hold_name="talk")
    assert other.cached_of["hold"] == len(PROMPT)
    assert sorted(given.left_s for given in other.scheduler.apply(HoldsGiven(8), other.now)) == [2.0, 4.0]


def test_holds_that_last_longest_are_given_first_and_each_once():
    harness = make(held_share=1.0, num_blocks=40)
    for number, ttl_s in enumerate((10.0, 30.0, 20.0)):
        held(harness, f"held {number}", [number * 10 + i for i in range(8)], ttl_s=ttl_s)
    given = [harness.scheduler.apply(HoldsGiven(2), 0.0) for _ in range(3)]
    assert [[prompt.ttl_s for prompt in prompts] for prompts in given] == [[30.0, 20.0], [10.0], []]
    harness.now = 5.0
    serve(harness, "next turn", [*range(10, 18), 7])
    assert [prompt.ttl_s for prompt in harness.scheduler.apply(HoldsGiven(8), 5.0)] == [30.0], "it has been used since"
    harness.now = 36.0
    assert not harness.scheduler.apply(HoldsGiven(8), 36.0), "all have ended"


def names_in(harness: TierHarness) -> set[bytes]:
    """Names of the blocks of PROMPT on disk and in the store."""
    hashes = block_hashes(PROMPT, 4)
    names = {name_of(0, hashes[i : i + 16]) for i in range(0, len(hashes), 16)}
    return names & (harness.disk.keys() | harness.store.keys())


def test_hold_that_its_client_ends_leaves_nothing():
    harness = TierHarness(**OPTIONS)
    held(harness, "held", hold_name="talk", client="alice")
    moved_down(harness)
    assert len(names_in(harness)) == 5
    harness.scheduler.apply(HoldsReleased("talk", "alice"), harness.now)
    harness.pass_time()
    assert not names_in(harness)


@PLACES
@pytest.mark.parametrize("is_under_way", [False, True])
def test_hold_that_is_deleted_before_its_blocks_are_written_leaves_none(options, is_under_way):
    harness = TierHarness(**options)
    assert held(harness, "held", hold_name="talk").refusal is None
    if is_under_way:
        harness.pass_time()
        assert harness.moving
    harness.scheduler.apply(HoldsReleased("talk", None), harness.now)
    harness.drain()
    assert not names_in(harness)
    harness.run()


def test_hold_stays_on_the_device_if_only_a_store_has_its_blocks_from_which_others_delete():
    harness = TierHarness(**STORE)
    held(harness, "held")
    harness.drain()
    harness.step()
    harness.store.clear()
    harness.list()
    flood(harness)
    assert len(on_device(harness)) == 5 and cached(harness) == 20
    assert harness.scheduler.parts[Holds].report().max_blocks, "its limit is the share of the device"
    harness.run()


class HoldsMachine(SchedulerMachine):
    """Promises are kept in a list of their own, and looked up in the prefix cache by tokens after every rule."""

    def more_options(self, data):
        self.promises: list[tuple[list[int], float]] = []  # tokens, and the end of their time
        self.answered: set[str] = set()
        share, per_client = data.draw(st.sampled_from([0.2, 0.5, 1.0])), data.draw(st.sampled_from([0.3, 1.0]))
        holds = {"held_share": share, "held_share_per_client": per_client, "max_hold_s": 50.0}
        return super().more_options(data) | holds

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=rests,
        marks=st.lists(st.tuples(st.integers(0, 25), st.sampled_from([1.0, 10.0, 60.0])), min_size=1, max_size=3),
        client=st.sampled_from(["a", "b"]),
        name=st.sampled_from(["", "talk"]),
        max_tokens=st.integers(1, 10),
        priority=st.integers(-1, 1),
    )
    def add_with_hold(self, prefix, rest, marks, client, name, max_tokens, priority):
        self.count += 1
        self.h.add(
            f"r{self.count}", prefix + rest, max_tokens=max_tokens, priority=priority, client=client, hold=marks,
            hold_name=name,
        )  # fmt: skip

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.h.step()
            self.look_up()

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def wait(self, seconds):
        self.h.now += seconds

    @precondition(lambda self: self.promises)
    @rule(client=st.sampled_from(["a", "b"]))
    def release(self, client):
        before = len(self.h.scheduler.parts[Holds].ends)
        self.h.scheduler.apply(HoldsReleased("talk", client), self.h.now)
        if len(self.h.scheduler.parts[Holds].ends) < before:
            self.promises.clear()  # which of them has ended is not known here
        self.h.scheduler.check()

    @rule()
    def clear(self):
        self.h.scheduler.apply(CacheCleared(), self.h.now)
        self.answered |= self.h.holds_of.keys()
        self.promises.clear()
        self.h.scheduler.check()

    def look_up(self):
        for name in self.h.holds_of.keys() - self.answered:
            self.answered.add(name)
            self.promises += [
                (self.h.prompts[name][: outcome.tokens], self.h.now + outcome.ttl_s)
                for outcome in self.h.holds_of[name]
                if outcome.refusal is None
            ]
        self.promises = [promise for promise in self.promises if promise[1] > self.h.now]
        kv_cache, size = self.h.scheduler.kv_cache, self.h.config.block_size
        for tokens, _ in self.promises:
            names = block_hashes(tokens, size)
            hashes = [names[i : i + 16] for i in range(0, len(names), 16)]
            assert len(hashes) * size == len(tokens)
            assert longest_prefix(kv_cache, hashes, self.below) == len(hashes), "a promise was broken"

    def below(self, group, block_hash):
        """Whether a tier has a block."""
        return False


class HoldsInTiersMachine(HoldsMachine, TierMachine):
    """Tiers keep holds while files are damaged and blocks go down and come up."""

    h: TierHarness

    @rule()
    def evict(self):
        """Holds would not survive it."""

    def look_up(self):
        if self.h.scheduler.parts[Holds].report().ended.get("lost", 0) > self.lost:
            self.lost = self.h.scheduler.parts[Holds].report().ended["lost"]
            self.promises.clear()  # which of them it was is not known here
        super().look_up()

    lost = 0

    def below(self, group, block_hash):
        return any(tier.index(group).has(name_of(group, block_hash)) for tier in self.h.offloading.tiers)


class HoldsInDecodeMachine(HoldsMachine, DecodeMachine):
    """Other engines compute prompts that are held here."""

    h: DecodeHarness


RULES = settings(max_examples=examples(100), stateful_step_count=40)
TestHolds = HoldsMachine.TestCase
TestHoldsInTiers = HoldsInTiersMachine.TestCase
TestHoldsInDecode = HoldsInDecodeMachine.TestCase
TestHolds.settings = TestHoldsInTiers.settings = TestHoldsInDecode.settings = RULES

"""Whole clusters, simulated, on bad days. `python -m tests.days SEED` lives through one again and prints its log."""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs

from cluster.autoscaling import policy  # noqa: F401 - imports Ray, which sets an environment variable
from engine.wire.plan import StepPlan, StepResult
from tests.days.day import Day, Fault, shrink
from tests.days.faults import FAULTS, ROOT
from tests.days.model import Runner
from tests.days.world import Outcome, World, run

FAST = 32  # days in every run: some 1,400 simulated seconds in 7 s of CPU time
SLOW = 150
WANTED = (
    "ended well",
    "client left",
    "replay engine_unavailable",
    "replay moved",
    "move received",
    "fetch received",
    "handoff received",
    "handoff closed expired",
    "draft accepted",
    "role change",
    "snapshot",
    "block stored",
    "block loaded",
    "a key is answered",
    "a client connects again",
    "a client loses its ingress",
    "an answer is computed again",
    "adapter loaded",
    "hold granted",
    "hold expired",
    "image received",
    "image found in the encoder cache",
    "requests of an API key are charged",
    "what a key has used is written",
    "a line of a batch is answered",
    "batch completed",
    "autoscaler: up",
    "autoscaler: to zero",
    "fault stand still",
)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def first_life(seed: int) -> Outcome:
    return run(Day.of(seed))


def well(seed: int, outcome: Outcome) -> Outcome:
    if outcome.error is not None:
        raise AssertionError(f"python -m tests.days {seed}") from outcome.error
    return outcome


def test_on_bad_days_every_request_gets_its_own_text_and_nothing_is_left_behind():
    seen = Counter[str]()
    for seed in range(FAST):
        seen += well(seed, first_life(seed)).seen
    for what in WANTED:
        assert seen[what], f"no day has {what!r}: these days try too little"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_on_many_bad_days_too(part):
    first = (int(os.environ.get("TEST_SEED", "0")) % 10**6 * 10 + part) * SLOW
    for seed in range(first, first + SLOW):
        well(seed, run(Day.of(seed)))


def test_a_seed_is_a_day():
    for seed in range(8):  # with ingresses that die or stand still, and all parts
        first, again = first_life(seed), run(Day.of(seed))
        assert (first.digest, first.log, first.seconds) == (again.digest, again.log, again.seconds), seed


def test_a_token_drawn_with_another_seed_is_seen(monkeypatch):
    launch = Runner.launch

    def slip(self: Runner, plan: StepPlan) -> tuple[float, StepResult]:
        if plan.step == 9:
            self._sequences = {slot: structs.replace(s, seed=s.seed + 1) for slot, s in self._sequences.items()}
        return launch(self, plan)

    monkeypatch.setattr(Runner, "launch", slip)
    assert "another text" in run(Day.of(3)).kind


def test_what_the_watch_over_queues_finds_fails_the_day(monkeypatch):
    async def watch(world):
        raise AssertionError("found")

    monkeypatch.setattr(World, "_watch", watch)
    assert run(Day.of(1)).kind == "AssertionError: found"


def test_of_the_faults_and_requests_of_a_day_only_those_that_matter_are_kept():
    day = Day.of(7)
    wanted = Fault(1.0, "pause", 1, 2, 3.0)
    day = replace(day, faults=(*day.faults, wanted, *day.faults))
    ask = day.asks[3]
    small = shrink(day, lambda other: wanted in other.faults and ask in other.asks)
    assert small.faults == (wanted,)
    assert small.asks == (ask,)


def test_all_faults_can_be_planted():
    assert len({fault.says for fault in FAULTS}) == 35
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.says

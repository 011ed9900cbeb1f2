"""Days that are sought and not drawn: one that reaches a state that none has reached before is kept, and changed in its
turn."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import random
import time
from collections.abc import Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.days.changes import CHANGES
from tests.days.day import Day, shrink
from tests.days.states import digests
from tests.days.world import Outcome, run

CORPUS = Path(__file__).with_name("corpus.jsonl")
FRESH = 0.2  # share of the days that are drawn, so that the search does not stay where it began
MOST_CHANGES = 40  # of a day: more take longer to make than they add
TOLD_S = 60.0  # between two lines that say how far the search is


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a day is made: that of a seed, with changes, one after the other."""

    seed: int
    changes: list[tuple[str, int]] = []

    def day(self) -> Day:
        day = Day.of(self.seed)
        for change, number in self.changes:
            day = CHANGES[change](day, random.Random(number))
        return day

    def changed(self, rng: random.Random) -> Recipe:
        more = [(rng.choice(list(CHANGES)), rng.getrandbits(32)) for _ in range(rng.choice([1, 1, 2, 4]))]
        return Recipe(self.seed, [*self.changes, *more])

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


RECIPE = msgspec.json.Decoder(Recipe)


@dataclass(frozen=True)
class Lived:
    """What a day has shown. bad: what was wrong, empty if nothing. cpu_s: with the making of the day."""

    recipe: Recipe
    states: frozenset[int]
    bad: str
    seconds: float
    cpu_s: float


@dataclass(eq=False)
class Kept:
    recipe: Recipe
    states: frozenset[int]
    new: int
    """States that it was the first to reach."""
    children: int = 0


@dataclass
class Search:
    """What a search knows: the states that were reached, the days that reached them first, and those that ended badly,
    one of each kind."""

    rng: random.Random
    fresh: float = FRESH
    next_seed: int = 10**6
    seen: set[int] = field(default_factory=set)
    kept: list[Kept] = field(default_factory=list)
    bad: dict[str, Recipe] = field(default_factory=dict)
    days: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def propose(self) -> Recipe:
        if not self.kept or self.rng.random() < self.fresh:
            self.next_seed += 1
            return Recipe(self.next_seed)
        parent = self.rng.choices(self.kept, [(1 + each.new) / (1 + each.children) for each in self.kept])[0]
        parent.children += 1
        return parent.recipe.changed(self.rng)

    def learn(self, lived: Lived) -> bool:
        """Take in a day. Returns whether it ended badly in a way that none has before."""
        self.days, self.seconds, self.cpu_s = self.days + 1, self.seconds + lived.seconds, self.cpu_s + lived.cpu_s
        if lived.bad:
            is_new = lived.bad not in self.bad
            self.bad.setdefault(lived.bad, lived.recipe)
            return is_new
        if (new := len(lived.states - self.seen)) and len(lived.recipe.changes) < MOST_CHANGES:
            self.kept.append(Kept(lived.recipe, lived.states, new))
        self.seen |= lived.states
        return False

    def run(self, known: Iterable[Recipe], seconds: float, processes: int) -> None:
        """Live through the known days, then through those that `propose` returns, until the time is over."""
        until, told_at, waiting = time.monotonic() + seconds, time.monotonic() + TOLD_S, list(known)[::-1]
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_quiet) as pool:
            running: set[Future[Lived]] = set()
            while running or time.monotonic() < until:
                while len(running) < 2 * processes and time.monotonic() < until:
                    running.add(pool.submit(live, waiting.pop() if waiting else self.propose()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    if self.learn(lived := each.result()):
                        print(f"{lived.bad}\n    {lived.recipe}", flush=True)
                if time.monotonic() > told_at:
                    told_at += TOLD_S
                    print(self, flush=True)

    def smallest(self, count: int) -> list[Recipe]:
        """Return the kept days that reach most, each the one that adds most to those before it."""
        left, found, covered = list(self.kept), list[Recipe](), set[int]()
        while left and len(found) < count:
            best = max(left, key=lambda each: len(each.states - covered) / (20 + len(str(each.recipe))))
            left.remove(best)
            if best.states - covered:
                found.append(best.recipe)
                covered |= best.states
        return found

    def __str__(self) -> str:
        return (
            f"cpu_s={self.cpu_s:.0f} days={self.days} states={len(self.seen)} kept={len(self.kept)} "
            f"bad={len(self.bad)} simulated_s={self.seconds:.0f}"
        )


def corpus() -> list[Recipe]:
    """Return the days that were kept in the repository."""
    return RECIPE.decode_lines(CORPUS.read_bytes())


def live(recipe: Recipe) -> Lived:
    began, states = time.process_time(), set[Hashable]()
    outcome = run(recipe.day(), states)
    return Lived(recipe, digests(states), outcome.kind, outcome.seconds, time.process_time() - began)


def smaller(recipe: Recipe, kind: str) -> tuple[Day, Outcome]:
    """Return a smaller day on which the same is wrong."""
    day = shrink(recipe.day(), lambda other: run(other).kind == kind)
    return day, run(day)


def _quiet() -> None:
    logging.disable(logging.CRITICAL)
    gc.freeze()

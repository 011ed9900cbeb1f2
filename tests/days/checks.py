"""Checks of cached KV, and tiers whose bytes flip from some time on. A flipped number is equal to the right one: texts
stay the same, and only what compares blocks tells them apart."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.parts.kv_check.kv_check import KVCheck
from tests.days.part import Part

if TYPE_CHECKING:
    from tests.days.day import Day
    from tests.days.engine import Engine
    from tests.days.world import World


@dataclass(frozen=True)
class Checks:
    """every: of so many tokens, one is computed for checks."""

    every: int

    def open(self, world: World) -> Part:
        return CheckPart(world)


def checks_of(engine: Engine) -> dict[str, dict[str, int]]:
    check = engine.core.scheduler.parts.get(KVCheck)
    return {} if check is None else check.report().checks


class CheckPart(Part):
    def __init__(self, world: World):
        self._cluster = world.cluster

    def check(self) -> None:
        if not self._cluster.flipped:
            for engine in self._cluster.engines.values():
                wrong = [kind for kind, results in checks_of(engine).items() if results["different"]]
                assert not wrong, f"{engine.engine_id}: {wrong} is accused, and nothing was flipped"

    def check_end(self) -> None:
        for engine in self._cluster.engines.values():
            if engine.alive and not engine.paused and (check := engine.core.scheduler.parts.get(KVCheck)):
                assert not check.awaits, f"{engine.engine_id}: a check never ends"

    def count(self) -> None:
        for engine in self._cluster.engines.values():
            for kind, results in checks_of(engine).items():
                for result, count in results.items():
                    self._cluster.seen[f"{kind} is {result}"] += count


def add(day: Day, rng: random.Random) -> Day:
    """Let the engines of some days check KV, and the tiers of some of these flip."""
    if rng.random() < 0.7:
        return day
    plan, size, faults = Checks(rng.choice([1, 1, 10])), day.size, day.faults
    if faults and rng.random() < 0.6:
        from tests.days.day import Fault

        # what is evicted comes back, and quicker than it is computed
        size = replace(size, host=30, num_blocks=24 if size.held is None else size.num_blocks)
        size = replace(size, block_s=min(size.block_s, 0.004), step_s=max(size.step_s, 0.02))
        at = [rng.choice(day.asks).at + rng.uniform(0, 2.0) for _ in range(rng.choice([2, 6]))]
        faults += tuple(Fault(each, "flip", rng.randrange(100), rng.randrange(100), 0.0) for each in at)
    return replace(day, size=replace(size, checks=plan.every), faults=faults, parts=(*day.parts, plan))

"""Checks of cached KV, for a scheduler: whatever comes from elsewhere may be flipped."""

from __future__ import annotations

from typing import Any

from engine.core.door.part import Part
from engine.core.output import Event
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kv_check.inputs import KVCompared
from engine.parts.kv_check.kv_check import CHECKED, KVCheck
from engine.parts.kv_check.messages import EQUAL, BlockPair
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from tests.fake_caches import CacheHarness
from tests.fake_handoffs import DecodeHarness
from tests.fake_runner import Harness
from tests.fake_tiers import TierHarness

LAYER = 3


class Flipped(tuple):
    """KV that a model takes for the right one, although it is not."""


def flipped(cells: Any) -> Any:
    return [Flipped(cell) for cell in cells]


class Checks(Harness):
    """One of these harnesses, whose scheduler checks what comes."""

    def __init__(self, *, every: int = 1, **options: Any):
        self._every = every
        self.compared: list[KVCompared] = []
        super().__init__(**options)
        self.check_part.listen_to(*map(self.scheduler.parts.get, (KVOffloading, KVFetching, Handoffs)))

    def more_parts(self) -> list[Part]:
        return [KVCheck(self._every, self.config.max_num_batched_tokens)]

    @property
    def check_part(self) -> KVCheck:
        return self.scheduler.parts[KVCheck]

    @property
    def checks(self) -> dict[str, dict[str, int]]:
        return self.check_part.report().checks

    def take_answers(self) -> None:
        super().take_answers()
        compared, self.compared = self.compared, []
        for given in compared:
            self.scheduler.apply(given, self.now)

    def commit(self) -> None:
        pair = self.scheduler.planned[0][0].record(BlockPair) if self.prepared else None
        if pair is not None:
            self.runner.execute, execute = self._watched(pair), self.runner.execute
        super().commit()
        if pair is not None:
            self.runner.execute = execute

    def _watched(self, pair: BlockPair) -> Any:
        """Compare as soon as the step is computed."""
        execute, size = self.runner.execute, self.config.block_size

        def watched(prepared: Any) -> Any:
            result = execute(prepared)
            of = [[self.runner.kv[block * size + i] for i in range(size)] for block in (pair.computed, pair.cached)]
            assert of[0] == of[1], "blocks of other tokens are compared"
            differs = any(isinstance(cell, Flipped) for cell in of[1])
            self.compared.append(KVCompared(pair.number, LAYER if differs else EQUAL))
            return result

        return watched

    def _record(self, event: Event) -> None:
        if CHECKED not in event.request.of:
            super()._record(event)

    def rest(self) -> int:
        """Step until there is nothing to do. Returns the number of steps that compute something."""
        before = len(self.plans)
        while self.step() is not None or self.prepared or self.compared:
            pass
        return len(self.plans) - before


class CheckedTiers(Checks, TierHarness):
    pass


class CheckedCaches(Checks, CacheHarness):
    pass


class CheckedDecode(Checks, DecodeHarness):
    pass

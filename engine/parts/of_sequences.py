"""What a part's end on a rank keeps of running sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from engine.runner.step_layout import SampledTokens
from engine.wire.plan import NewSequence

T = TypeVar("T")


class OfSequences(dict[int, T]):
    """By slot, what sequences ask of a part: only those that do are in it."""

    def add(self, added: Iterable[NewSequence], asked: Callable[[NewSequence], T | None]) -> None:
        """Keep what new sequences ask for. Whoever had their slots before has left them."""
        for new in added:
            self.pop(new.slot, None)
            if (found := asked(new)) is not None:
                self[new.slot] = found

    def rows(self, sampled: SampledTokens) -> Iterator[tuple[int, int, int, T]]:
        """Yield row, slot and position of each token that a step samples for one of them, and what is kept."""
        for row, (slot, position) in enumerate(zip(sampled.slots.tolist(), sampled.positions.tolist(), strict=True)):
            if slot in self:
                yield row, slot, position, self[slot]

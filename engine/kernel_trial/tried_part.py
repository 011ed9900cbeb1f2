"""What a trial of kernels needs of a part of a rank that adds to layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from engine.wire.part_record import PartRecord


@runtime_checkable
class TriedPart(Protocol):
    """A RankPart that adds to the products of layers by kernels of its own."""

    def twins(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """Return the plain version of each of its kernels. Called where there is a GPU."""

    def added(self) -> list[object]:
        """Return the objects that hold its kernels, and are no modules."""

    def fill(self) -> None:
        """Fill what it adds with random numbers, the same each time."""

    def use(self) -> PartRecord:
        """Return the record of a sequence that uses it."""


def tried_parts(runner: Any) -> list[TriedPart]:
    """Return such parts of a ModelRunner."""
    return [part for part in runner.parts.all if isinstance(part, TriedPart)]

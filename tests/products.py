"""Products of parameters, of which `make test` runs as few as meet one another and `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Return the product of the factors, in which few runs hold every pair of values; the others are slow."""
    return covering(2, *factors)


def each_once(*factors: Iterable[Any]) -> list[Any]:
    """Return the product of the factors, in which few runs hold every value; the others are slow."""
    return covering(1, *factors)


def covering(together: int, *factors: Iterable[Any]) -> list[Any]:
    """Return the product of the factors. Ordinary runs hold any `together` values of different factors, chosen greedily
    as what holds most that are missing; the others have the mark `slow`, as have all that hold a value with a mark."""
    values = [list(factor) for factor in factors]
    runs = list(product(*(range(len(factor)) for factor in values)))
    unmarked = [run for run in runs if not any(_is_marked(factor[i]) for factor, i in zip(values, run, strict=True))]
    missing = {held for run in unmarked for held in _held(run, together)}
    chosen = set()
    while missing:
        best = max(unmarked, key=lambda run: (len(missing & _held(run, together)), -_uses(run, chosen)))
        chosen.add(best)
        missing -= _held(best, together)
    return [
        pytest.param(*(_plain(factor[i]) for factor, i in zip(values, run, strict=True)), marks=_marks(run in chosen))
        for run in runs
    ]


def _is_marked(value: Any) -> bool:
    return isinstance(value, ParameterSet) and bool(value.marks)


def _plain(value: Any) -> Any:
    return value.values[0] if isinstance(value, ParameterSet) else value


def _uses(run: tuple[int, ...], chosen: set[tuple[int, ...]]) -> int:
    """Return how often values of a run were chosen: those that were chosen least are next."""
    return sum(other[i] == value for other in chosen for i, value in enumerate(run))


def _held(run: tuple[int, ...], together: int) -> set[tuple[tuple[int, int], ...]]:
    """Return the combinations of `together` values, each as factor and index, that a run holds."""
    return set(combinations(enumerate(run), together))


def _marks(ordinary: bool) -> list[pytest.MarkDecorator]:
    return [] if ordinary else [pytest.mark.slow]

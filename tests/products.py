"""Products of parameters. No run holds all of a product: runs are chosen that hold what can meet in the code."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Return few runs that hold every pair of values. Those with a value that is slow are slow."""
    return covering(2, 2, *factors)


def each_once(*factors: Iterable[Any]) -> list[Any]:
    """Return few runs that hold every value, and slow ones with which they hold every pair of values."""
    return covering(1, 2, *factors)


def in_turns(*factors: Iterable[Any]) -> list[Any]:
    """Return few runs that hold every value. Those with a value that is slow are slow."""
    return covering(1, 1, *factors)


def covering(together: int, slow_together: int, *factors: Iterable[Any]) -> list[Any]:
    """Return runs of the product of the factors, chosen greedily as what holds most that are missing.

    Ordinary runs hold any `together` values of different factors, if no value has a mark. Further runs, with the mark
    `slow`, hold any `slow_together` values, those with a mark included."""
    values = [list(factor) for factor in factors]
    runs = list(product(*(range(len(factor)) for factor in values)))
    unmarked = [run for run in runs if not any(_is_marked(factor[i]) for factor, i in zip(values, run, strict=True))]
    ordinary = _choose(unmarked, together, [])
    chosen = ordinary + _choose(runs, slow_together, ordinary)
    return [
        pytest.param(*(_plain(factor[i]) for factor, i in zip(values, run, strict=True)), marks=_marks(run in ordinary))
        for run in sorted(chosen)
    ]


def few(count: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return the values of one factor, or runs, of which the first `count` without the mark `slow` stay so, and the
    others get it."""
    found: list[ParameterSet] = []
    for value in values:
        param = value if isinstance(value, ParameterSet) else pytest.param(value)
        is_ordinary = not param.marks and sum(not each.marks for each in found) < count
        found.append(param if is_ordinary else pytest.param(*param.values, id=param.id, marks=pytest.mark.slow))
    return found


def slow(values: Iterable[Any]) -> list[ParameterSet]:
    """Return values of a factor, each with the mark `slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _choose(runs: list[tuple[int, ...]], together: int, before: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return runs that hold, with those before, any `together` values that one of `runs` holds."""
    held = {run: set(combinations(enumerate(run), together)) for run in {*runs, *before}}
    missing = {combination for run in runs for combination in held[run]}
    missing -= {combination for run in before for combination in held[run]}
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(runs, key=lambda run: (len(missing & held[run]), -_uses(run, [*before, *chosen])))
        chosen.append(best)
        missing -= held[best]
    return chosen


def _is_marked(value: Any) -> bool:
    return isinstance(value, ParameterSet) and bool(value.marks)


def _plain(value: Any) -> Any:
    return value.values[0] if isinstance(value, ParameterSet) else value


def _uses(run: tuple[int, ...], chosen: list[tuple[int, ...]]) -> int:
    """Return how often values of a run were chosen: those that were chosen least are next."""
    return sum(other[i] == value for other in chosen for i, value in enumerate(run))


def _marks(ordinary: bool) -> list[pytest.MarkDecorator]:
    return [] if ordinary else [pytest.mark.slow]

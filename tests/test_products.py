from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.products import each_once, few, in_turns, pairwise

FACTORS = ["abcd", [1, 2, 3], [True, False]]


def runs(params: list, *, slow: bool) -> list[tuple]:
    return [param.values for param in params if bool(param.marks) == slow]


def pairs(some: list[tuple]) -> set[tuple]:
    return {pair for run in some for pair in combinations(enumerate(run), 2)}


def test_ordinary_runs_hold_each_value_and_the_slow_ones_hold_the_other_pairs():
    params = each_once(*FACTORS)
    ordinary, slow = runs(params, slow=False), runs(params, slow=True)
    assert len(ordinary) == 4
    assert [set(column) for column in zip(*ordinary, strict=True)] == [set(factor) for factor in FACTORS]
    assert pairs(ordinary + slow) == pairs(list(product(*FACTORS))) and len(slow) <= 10


@pytest.mark.parametrize(("chosen", "number"), [(each_once, 9), (in_turns, 4)])
def test_values_that_are_slow_are_in_no_ordinary_run(chosen, number):
    params = chosen([1, 2, pytest.param(3, marks=pytest.mark.slow)], "abc")
    assert {run[0] for run in runs(params, slow=False)} == {1, 2} and len(runs(params, slow=False)) == 3
    assert {run[0] for run in runs(params, slow=True)} >= {3} and len(params) == number


def test_few_of_the_ordinary_ones_stay_so_and_none_is_left_out():
    params = few(1, [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, id="three")])
    assert [(param.values, bool(param.marks)) for param in params] == [((1,), True), ((2,), False), ((3,), True)]
    assert params[2].id == "three"


@pytest.mark.parametrize("factors", [FACTORS, FACTORS[:2], [range(2)] * 4, [range(5), range(1), range(3)]])
def test_few_runs_hold_every_pair_of_values_of_two_factors(factors):
    found = runs(pairwise(*factors), slow=False)
    assert pairs(found) == pairs(list(product(*factors)))
    assert len(found) == len(set(found)) <= max(9, len(list(product(*sorted(map(list, factors), key=len)[-2:]))) + 2)

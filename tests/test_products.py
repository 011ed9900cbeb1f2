from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.products import each_once, pairwise

FACTORS = ["abcd", [1, 2, 3], [True, False]]


def runs(params: list, *, slow: bool) -> list[tuple]:
    return [param.values for param in params if bool(param.marks) == slow]


def test_ordinary_runs_hold_each_value_and_the_slow_ones_are_the_rest_of_the_product():
    params = each_once(*FACTORS)
    ordinary = runs(params, slow=False)
    assert len(ordinary) == 4
    assert [set(column) for column in zip(*ordinary, strict=True)] == [set(factor) for factor in FACTORS]
    assert sorted(ordinary + runs(params, slow=True)) == sorted(product(*FACTORS))


def test_values_that_are_slow_are_in_no_ordinary_run():
    params = each_once([1, 2, pytest.param(3, marks=pytest.mark.slow)], "abc")
    assert {run[0] for run in runs(params, slow=False)} == {1, 2} and len(runs(params, slow=False)) == 3
    assert sorted(runs(params, slow=False) + runs(params, slow=True)) == sorted(product([1, 2, 3], "abc"))


@pytest.mark.parametrize("factors", [FACTORS, FACTORS[:2], [range(2)] * 4, [range(5), range(1), range(3)]])
def test_ordinary_runs_hold_every_pair_of_values_of_two_factors(factors):
    params = pairwise(*factors)
    ordinary = runs(params, slow=False)
    for first, second in combinations(range(len(factors)), 2):
        assert {(run[first], run[second]) for run in ordinary} == set(product(factors[first], factors[second]))
    assert len(params) == len(list(product(*factors)))


def test_pairs_of_many_factors_take_few_runs():
    assert len(runs(pairwise(*[range(2)] * 4), slow=False)) < 9

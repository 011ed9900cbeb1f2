"""The search for days that reach what none has reached, and the days that it has found."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import cache

import pytest

from cluster.autoscaling import policy  # noqa: F401 - imports Ray, which sets an environment variable
from tests.days.changes import CHANGES
from tests.days.day import Day
from tests.days.guided import CORPUS, Kept, Lived, Recipe, Search, corpus, live

FAST = 8  # days of the corpus in every run


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def first_life(number: int) -> Lived:
    return live(corpus()[number])


def check(found: Lived) -> None:
    assert not found.bad, f"{found.bad}: python -m tests.days '{found.recipe}'"


def test_days_of_the_corpus_still_end_well():
    for number in range(FAST):
        check(first_life(number))


@pytest.mark.slow
def test_every_day_of_the_corpus_still_ends_well():
    for recipe in corpus()[FAST:]:
        check(live(recipe))


def test_the_corpus_is_small_and_none_of_its_days_is_there_twice():
    recipes = corpus()
    assert CORPUS.stat().st_size < 50_000
    assert len({str(recipe) for recipe in recipes}) == len(recipes) > 50


def test_a_recipe_makes_the_same_day_again_and_reaches_the_same_states():
    number = max(range(FAST), key=lambda each: len(corpus()[each].changes))
    recipe = corpus()[number]
    assert recipe.changes
    assert recipe.day() == recipe.day()
    assert live(recipe).states == first_life(number).states


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_changes_some_days_and_leaves_the_given_one_as_it_is(change):
    changed = 0
    for seed in range(12):
        day = Day.of(seed)
        changed += CHANGES[change](day, random.Random(seed)) != day
        assert day == Day.of(seed)
    assert changed


def lived(recipe: Recipe, *states: int, bad: str = "") -> Lived:
    return Lived(recipe, frozenset(states), bad, 1.0, 0.1)


def test_only_days_that_reach_a_new_state_are_kept():
    search = Search(random.Random(1))
    search.learn(lived(Recipe(1), 1, 2))
    search.learn(lived(Recipe(2), 2))
    search.learn(lived(Recipe(3), 2, 3))
    assert [each.recipe.seed for each in search.kept] == [1, 3]
    assert search.seen == {1, 2, 3}


def test_a_day_that_ends_badly_is_told_once_for_each_kind_and_not_kept():
    search = Search(random.Random(1))
    assert search.learn(lived(Recipe(1), 1, bad="a"))
    assert not search.learn(lived(Recipe(2), 2, bad="a"))
    assert search.learn(lived(Recipe(3), 3, bad="b"))
    assert not search.kept
    assert {kind: recipe.seed for kind, recipe in search.bad.items()} == {"a": 1, "b": 3}


def test_without_fresh_seeds_what_is_proposed_are_changes_of_kept_days():
    search = Search(random.Random(1), fresh=0.0, kept=[Kept(Recipe(7), frozenset({1}), 1)])
    for _ in range(20):
        proposed = search.propose()
        assert proposed.seed == 7 and proposed.changes


def test_the_corpus_leaves_out_days_that_add_nothing_to_the_others():
    search = Search(random.Random(1))
    for seed, states in ((1, {1, 2}), (2, {3}), (3, {1, 2, 3, 4})):
        search.learn(lived(Recipe(seed), *states))
    assert [recipe.seed for recipe in search.smallest(5)] == [3]


def test_a_change_of_a_day_on_which_the_autoscaler_decides_adds_no_fault_that_does_its_work():
    scaled = next(day for day in map(Day.of, range(200)) if day.scales)
    many = replace(scaled, faults=())
    for number in range(60):
        many = CHANGES["splice"](replace(many, asks=scaled.asks), random.Random(number))
    assert many.faults
    assert not {fault.kind for fault in many.faults} & {"scale", "switch role"}

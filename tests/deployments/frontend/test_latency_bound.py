from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.frontend.latency_bound import COVERAGE, MEMORY, LatencyBound
from tests.examples import examples

SECONDS = st.floats(1e-4, 1e4)


def beyond(bound: LatencyBound, latencies: Iterable[tuple[float, float]]) -> int:
    """Number of (expected, actual) latencies that are beyond the bounds told for them."""
    return sum(not bound.observe(expected, actual, expected * bound.ratio) for expected, actual in latencies)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=400))
def test_of_any_latencies_no_more_than_the_share_that_was_told_are_beyond_their_bounds(latencies):
    assert beyond(LatencyBound(), latencies) <= (1 - COVERAGE) * len(latencies) + 6


@given(st.integers(0, 2**32), st.floats(1.0, 1.2))
def test_latencies_that_grow_without_end_are_within_their_bounds_as_often_as_told(seed, growth):
    rng, count = random.Random(seed), 300
    latencies = ((1.0, growth**i * rng.uniform(0.5, 2)) for i in range(count))
    assert beyond(LatencyBound(), latencies) <= (1 - COVERAGE) * count + 6


STATIONARY: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(0.3, 1.0),
    "narrow": lambda rng: rng.lognormvariate(-1.0, 0.05),
    "exponential": lambda rng: rng.expovariate(2.0),
    "mixture of cached prompts and others": lambda rng: (
        rng.uniform(0.1, 0.2) if rng.random() < 0.7 else rng.gauss(3, 0.3)
    ),
    "heavy tail": lambda rng: rng.paretovariate(1.1),
}


@pytest.mark.parametrize("name", STATIONARY)
@settings(max_examples=examples(80))
@given(seed=st.integers(0, 2**32))
def test_the_share_within_the_bound_is_near_its_target_on_any_stationary_stream(name, seed):
    rng, bound, count = random.Random(seed), LatencyBound(), 2000
    missed = beyond(
        bound, ((expected := rng.uniform(0.01, 10), expected * STATIONARY[name](rng)) for _ in range(count))
    )
    assert 1 - missed / count == pytest.approx(COVERAGE, abs=0.03)


def test_latencies_that_are_all_as_expected_do_not_lower_the_bound_below_them():
    bound = LatencyBound()
    assert beyond(bound, [(0.1, 0.3)] * 1000) == 0
    assert bound.ratio == pytest.approx(3)


def test_nothing_is_promised_before_enough_is_known():
    bound = LatencyBound()
    assert math.isinf(bound.ratio)
    beyond(bound, [(1.0, 1.0)] * 7)
    assert math.isinf(bound.ratio)
    beyond(bound, [(1.0, 1.0)] * 12)
    assert bound.ratio == 1.0


def test_old_latencies_are_forgotten():
    bound = LatencyBound()
    beyond(bound, [(1.0, 50.0)] * 100)
    beyond(bound, [(1.0, 2.0)] * MEMORY)
    assert bound.ratio == 2.0

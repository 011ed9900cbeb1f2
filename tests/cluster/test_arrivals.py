import math

import numpy as np
import pytest

from cluster.arrivals import arrival_times


def gaps(burstiness: float) -> np.ndarray:
    return np.diff(arrival_times(20_000, request_rate=50, burstiness=burstiness), prepend=0.0)


def test_requests_come_at_the_rate_asked_for():
    assert gaps(1.0).mean() == pytest.approx(1 / 50)
    assert arrival_times(200, request_rate=8)[-1] == pytest.approx(25)


def test_a_poisson_process_has_gaps_that_vary_as_much_as_they_are_long():
    spread = gaps(1.0)
    assert spread.std() / spread.mean() == pytest.approx(1, rel=0.05)
    assert np.mean(spread > 2 / 50) == pytest.approx(math.exp(-2), rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_how_uneven_the_gaps_are(burstiness):
    spread = gaps(burstiness)
    assert spread.mean() == pytest.approx(1 / 50)
    assert spread.std() / spread.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


def test_times_ascend_and_are_those_of_the_seed():
    times = arrival_times(100, 10, seed=1)
    assert times == sorted(times)
    assert times == arrival_times(100, 10, seed=1) != arrival_times(100, 10, seed=2)

import numpy as np
import pytest

from cluster.cli.bench.distribution import Distribution


def test_percentiles_interpolate_between_the_two_nearest_values():
    summary = Distribution.of([10.0, 0.0, 20.0, 30.0, 40.0])
    assert summary == Distribution(mean=20, median=20, min=0, max=40, p90=36, p99=pytest.approx(39.6))


def test_percentiles_are_those_of_numpy():
    values = np.random.default_rng(0).exponential(size=1001).tolist()
    summary = Distribution.of(values)
    assert summary.p90 == pytest.approx(np.percentile(values, 90))
    assert summary.p99 == pytest.approx(np.percentile(values, 99))
    assert summary.mean == pytest.approx(np.mean(values))


def test_one_value_is_all_of_its_statistics():
    assert Distribution.of([3.5]) == Distribution(3.5, 3.5, 3.5, 3.5, 3.5, 3.5)


def test_nothing_has_no_statistics():
    assert Distribution.of([]) is None

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.smoothing import Mean, Stabilizer


def test_a_mean_starts_with_its_first_value_and_follows_with_its_memory():
    mean = Mean(10.0)
    assert mean.add(8.0, 100.0) == 8.0
    assert mean.add(0.0, 110.0) == pytest.approx(8.0 * 0.36788, rel=1e-3)
    assert mean.add(5.0, 1000.0) == pytest.approx(5.0)


def test_a_clock_that_stands_still_changes_no_mean():
    mean = Mean(10.0)
    mean.add(8.0, 100.0)
    assert mean.add(0.0, 100.0) == 8.0


def test_more_is_given_once_it_was_wanted_for_the_delay():
    stabilizer = Stabilizer(up_s=3.0, down_s=60.0)
    assert [stabilizer.settle(4, 1, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1, 1, 1, 4, 4]


def test_a_dip_puts_growth_off():
    stabilizer = Stabilizer(up_s=3.0, down_s=60.0)
    desired_counts = [(0.0, 4), (2.0, 2), (4.0, 4), (6.0, 4)]
    assert [stabilizer.settle(desired, 1, now) for now, desired in desired_counts] == [1, 1, 2, 4]


def test_the_most_that_was_wanted_during_the_delay_stays():
    stabilizer = Stabilizer(up_s=0.0, down_s=60.0)
    desired_counts = [(0.0, 5), (30.0, 3), (59.0, 1), (61.0, 1), (91.0, 1)]
    assert [stabilizer.settle(desired, 5, now) for now, desired in desired_counts] == [5, 5, 5, 3, 1]


@given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(1, 30)), max_size=40), st.integers(1, 30))
def test_what_is_settled_lies_between_what_there_is_and_what_was_wished_for(gaps, start):
    stabilizer, now, current, desired_counts = Stabilizer(3.0, 30.0), 0.0, start, [start]
    for gap, desired in gaps:
        now += gap
        desired_counts.append(desired)
        current = stabilizer.settle(desired, current, now)
        assert min(desired_counts) <= current <= max(desired_counts)

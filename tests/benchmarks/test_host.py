import pytest

from benchmarks.host import PARTS, measure


@pytest.mark.parametrize("sampling", ["greedy", "eagle3"])
def test_every_part_of_a_step_is_measured_and_they_add_up(sampling):
    found = measure(sampling, 2, steps=2)
    assert set(found.parts) == set(PARTS) and all(time >= 0 for time in found.parts.values())
    assert found.total_us == sum(found.parts.values()) > 0

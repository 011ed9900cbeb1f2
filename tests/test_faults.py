"""The list of faults keeps up with the code: python -m tests.faults shows that each is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.faults import CORE, DEPLOYMENTS, FAULTS, TRANSFER_ROUTING_JOBS

ROOT = Path(__file__).parents[1]


def test_there_are_ten_faults_of_each_part():
    assert [len(faults) for faults in (CORE, DEPLOYMENTS, TRANSFER_ROUTING_JOBS)] == [10, 10, 10]
    assert max(Counter(fault.says for fault in FAULTS).values()) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.says)
def test_a_fault_can_be_planted_and_has_a_row_in_the_readme(fault, tmp_path):
    planted = tmp_path / fault.file
    planted.parent.mkdir(parents=True)
    planted.write_text((ROOT / fault.file).read_text())
    assert fault.plant(tmp_path) == (ROOT / fault.file).read_text() != planted.read_text()
    assert all((ROOT / test.partition("::")[0]).is_file() for test in fault.tests)
    assert f"| {fault.says} |" in (ROOT / "tests" / "README.md").read_text()

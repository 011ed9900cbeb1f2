"""No kernel is compiled in a served step: what the warm-up, the graphs and the memory profile compile is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.model.ops.gpu.specializations import CASES, COLD


def missing(case: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.model.ops.gpu.specializations", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["case"] == case
    return found["missing"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_random_steps_need_no_variant_of_a_kernel_that_was_not_compiled_before_the_first_request(case):
    assert missing(case) == []


@pytest.mark.slow
def test_a_variant_that_the_warm_up_lacks_is_found():
    found = missing(f"images{COLD}")
    assert found and all(variant.startswith(("attend_kernel", "plan_kernel")) for variant in found)

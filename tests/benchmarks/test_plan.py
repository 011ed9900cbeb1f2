"""What `make first-gpu` should take is counted before it starts, and stands beside what it took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import first, parts, plan
from benchmarks.gpu.expected import CASES, count
from benchmarks.gpu.first import FIRST, FIRST_S
from benchmarks.gpu.parts import Part

CORES = 16
PLAN = f"""
import json
from benchmarks.gpu import first, plan
kernels = first.kernels(plan.CAPABILITY)
costs = {{cores: plan.plan(cores) for cores in (1, {CORES})}}
launches = [(one.kernel.fn.__name__, one.options.get("launch_pdl", False)) for one in first.each_once(kernels)]
engine = {{one.key for one in kernels["8B engine"]}}
more = [one.kernel.fn.__name__ for one in kernels["8B"] if one.key not in engine]
print(json.dumps({{"costs": costs, "launches": launches, "more": more}}))
"""
"""Kernels are interpreted in the tests' own process, where Triton tells no variants apart."""


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", PLAN], env=environment, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


@pytest.fixture
def planned(counted) -> dict[str, list[plan.Cost]]:
    costs = counted["costs"][str(CORES)]
    return {part: [plan.Cost(*cost) for cost in of_part] for part, of_part in costs.items()}


@pytest.mark.slow
def test_all_parts_together_should_take_less_than_eight_minutes_and_each_less_than_its_limit(planned):
    assert list(planned) == [part.name for part in FIRST]
    assert sum(map(plan.seconds, planned.values())) < FIRST_S == 8 * 60
    assert {part.name for part in FIRST if not 0 < plan.seconds(planned[part.name]) < part.limit_s} == set()


@pytest.mark.slow
def test_steps_cost_what_they_are_expected_to_take_at_a_cards_rates(planned):
    case, steps = CASES["decode 8B, batch 64"], parts.WARM_STEPS + parts.STEPS + parts.PROFILED_STEPS
    expected = count(case).expected_s(plan.CARD, case)
    costs = {cost.what: cost.seconds for cost in planned["8B, one engine"]}
    assert costs[f"{steps} steps of 64"] == pytest.approx(steps * expected, rel=1e-3)


@pytest.mark.slow
def test_kernels_of_all_trials_are_compiled_as_they_are_launched_by_all_cores(counted):
    launches = counted["launches"]
    for name in ("attend_kernel", "linear_attention_kernel", "latent_kernel", "grouped_kernel"):
        assert {early for kernel, early in launches if kernel == name} == {True}
    assert ["expand_kernel", False] in launches, "adapters"
    for cores in (1, CORES):
        costs = {what: seconds for seconds, what in counted["costs"][str(cores)]["kernels compiled"]}
        expected = len(launches) * plan.KERNEL_S / cores
        assert costs[f"{len(launches)} kernels in {cores} processes"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_trial_compiles_nothing_that_the_engine_does_not_compile_anyway(counted):
    assert counted["more"] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["8B, one engine", "decode 30B-A3B, batch 64"])
def test_the_trial_at_an_engines_first_start_should_take_less_than_two_seconds(part, planned):
    costs = [
        cost for cost in planned[part] if re.search("comparisons of kernels|small models|graphs of them", cost.what)
    ]
    assert len(costs) == 3
    assert 0.5 < plan.seconds(costs) < 2


COSTS = {"one": [plan.Cost(7.0, "process"), plan.Cost(2.0, "2 tests")], "two": [plan.Cost(1.0, "process")]}
LINES = ["| one | 9 s | 60 s | 7.0 s process; 2.0 s 2 tests |", "| two | 1 s | 60 s | 1.0 s process |"]


@pytest.fixture
def two_parts(monkeypatch) -> None:
    both = tuple(Part(name, 60, command=("-c", "")) for name in COSTS)
    monkeypatch.setattr(bench, "FIRST", both)
    monkeypatch.setattr(first, "FIRST", both)
    monkeypatch.setattr(plan, "plan", lambda cores: COSTS)


def test_the_plan_is_printed_where_there_is_no_gpu(two_parts, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--plan", str(CORES)])
    assert bench.main() == 0
    assert capfd.readouterr().out.splitlines()[2:] == [*LINES, "| all | 10 s | 480 s | |"]


def test_what_was_planned_is_printed_first_and_stands_beside_what_a_part_took(two_parts, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bench, "gpus", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--first", "--out", str(tmp_path)])
    assert bench.main() == 0
    printed = capfd.readouterr()
    assert printed.err.index(LINES[0]) < printed.err.index("one ...")
    assert [row.planned_s for row in bench.saved(tmp_path)] == [9.0, 1.0]
    assert " s of 9 planned |" in printed.out and " s of 1 planned |" in printed.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [("tests of kernels", ".py", plan.KERNEL_TESTS), ("tests of engines", "test_engine.py", plan.ENGINE_TESTS)],
)
def test_as_many_tests_are_planned_as_there_are(name, file, expected):
    (part,) = (part for part in FIRST if part.name == name)
    command = [sys.executable, *part.command, "-p", "no:xdist", "--collect-only"]
    if "-n" in command:
        del command[command.index("-n") : command.index("-n") + 2]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False).stdout
    counts = dict(line.rsplit(": ", 1) for line in found.splitlines() if ".py: " in line)
    assert sum(int(number) for name, number in counts.items() if name.endswith(file)) == pytest.approx(
        expected, rel=0.1
    )

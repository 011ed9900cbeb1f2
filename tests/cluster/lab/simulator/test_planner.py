from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.planner import Planner
from cluster.lab.simulator.spec import GoodputSlo
from cluster.lab.simulator.trace import make_trace
from tests.cluster.lab.simulator.small_cluster import small_cluster

TRACE = make_trace("fixed", 60, 40.0)
SLO = GoodputSlo(ttft_s=0.3, tpot_s=0.015)


def test_the_plan_is_the_smallest_cluster_that_is_good_enough():
    plan = Planner(replace(small_cluster(1, router="round_robin"), slo=SLO), TRACE, 64).plan()
    assert plan.shared and plan.split and plan.best
    assert plan.shared.report.good >= SLO.fraction
    fewer = small_cluster(router="round_robin", replicas=plan.shared.decode - 1)
    assert simulate(replace(fewer, slo=SLO), TRACE).good < SLO.fraction
    assert plan.split.report.good >= SLO.fraction
    for prefill, decode in ((plan.split.prefill - 1, plan.split.decode), (plan.split.prefill, plan.split.decode - 1)):
        if prefill and decode:
            smaller = small_cluster(prefill, replicas=decode, router="round_robin")
            assert simulate(replace(smaller, slo=SLO), TRACE).good < SLO.fraction
    assert plan.best.gpus == min(plan.shared.gpus, plan.split.gpus)


def test_no_cluster_keeps_what_no_engine_can():
    plan = Planner(replace(small_cluster(1), slo=GoodputSlo(ttft_s=0.3, tpot_s=0.001)), TRACE, 4).plan()
    assert plan.best is None
    assert max(candidate.gpus for candidate in plan.tried) == 4


def test_the_command_prints_a_report_and_a_plan():
    options = ["simulate", "--requests", "60", "--trace", "fixed", "--rate", "20", "--replicas", "2"]
    found = CliRunner().invoke(cli.app, [*options, "--json"])
    assert found.exit_code == 0
    report = json.loads(found.stdout)
    assert report["completed"] == 60 and report["pools"]["decode"]["replicas"] == 2
    assert "first token within 2000 ms" in CliRunner().invoke(cli.app, options).stdout
    planned = CliRunner().invoke(cli.app, [*options, "--plan", "--prefill-replicas", "1"])
    assert planned.exit_code == 0
    assert "take 1 replica" in planned.stdout


def test_the_command_runs_a_trace_that_was_written(tmp_path):
    path = str(tmp_path / "t.jsonl")
    command = [sys.executable, "-m", "benchmarks.simulator.write_trace", "--trace", "mooncake", "--requests", "30"]
    assert "endless prefix cache" in subprocess.check_output([*command, "--output", path], text=True)
    found = CliRunner().invoke(cli.app, ["simulate", "--trace", path, "--requests", "20", "--json", "--autoscale", "6"])
    assert json.loads(found.stdout)["completed"] == 20


def test_options_that_mean_nothing_are_refused():
    for options in (["--router", "no"], ["--card", "no"], ["--model", "no"], ["--trace", "no"], ["--handoff", "no"]):
        assert CliRunner().invoke(cli.app, ["simulate", *options]).exception is not None

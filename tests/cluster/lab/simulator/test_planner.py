from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.cost_model import roofline
from cluster.lab.simulator.planner import CHANCE, Plan, Planner
from cluster.lab.simulator.report import show_plan
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import Trace, make_trace
from tests.cluster.lab.simulator.small_cluster import CARD, MODEL, small_cluster
from tests.products import few

TRACE = make_trace("fixed", 60, 40.0)
SLO = GoodputSlo(ttft_s=0.3, tpot_s=0.015)
MAX_GPUS = 4
LOADS = [  # trace, requests/s, burstiness, time to the first token, time per token
    ("fixed", 300, 0.2, 0.5, 0.012),
    ("fixed", 600, 1.0, 0.2, 0.008),
    ("azure-code", 60, 0.5, 0.5, 0.05),
    ("azure-conversation", 20, 1.0, 0.5, 0.02),
    ("mooncake", 6, 1.0, 2.0, 0.05),
    ("shared-prefix", 40, 1.0, 0.3, 0.02),
    ("fixed", 40, 1.0, 0.3, 0.015),
    ("fixed", 300, 1.0, 0.2, 0.015),
    ("azure-code", 30, 1.0, 1.0, 0.05),
    ("azure-conversation", 60, 1.0, 1.0, 0.05),
]


def clusters_of(slo: GoodputSlo, prefill: int = 1) -> list[ClusterSpec]:
    """Return a cluster for each size of a replica, 2 GPUs first."""
    spec = replace(small_cluster(prefill, router="round_robin", num_blocks=10_000), slo=slo)
    return [replace(spec, replica_gpus=ranks, cost=roofline(MODEL, CARD, ranks)) for ranks in (2, 1, 4)]


def sizes_within(gpus: int, replica_gpus: int) -> Iterator[tuple[int, int]]:
    """Yield all numbers of decode and of prefill replicas."""
    replicas = gpus // replica_gpus
    yield from ((decode, prefill) for decode in range(1, replicas + 1) for prefill in range(replicas - decode + 1))


@pytest.mark.parametrize("load", few(6, LOADS), ids=str)
def test_no_smaller_cluster_meets_the_limits(load, monkeypatch):
    trace, rate, burstiness, ttft_s, tpot_s = load
    traffic = make_trace(trace, 30, rate, burstiness=burstiness)
    specs = clusters_of(GoodputSlo(ttft_s=ttft_s, tpot_s=tpot_s))
    simulated = cache(lambda spec, trace: simulate(spec, trace))
    monkeypatch.setattr("cluster.lab.simulator.planner.simulate", simulated)
    plan = Planner(specs, traffic, MAX_GPUS).plan()
    fewest = {}
    for spec in specs:
        for decode, prefill in sizes_within(MAX_GPUS, spec.replica_gpus):
            report = simulated(replace(spec, replicas=decode, prefill_replicas=prefill), traffic)
            if report.good >= spec.slo.fraction:
                fewest[bool(prefill)] = min(report.gpus, fewest.get(bool(prefill), report.gpus))
    found = {False: plan.shared, True: plan.split}
    assert {split: candidate.gpus for split, candidate in found.items() if candidate} == fewest


@dataclass
class Served:
    """As much of a report as a plan reads."""

    gpus: int
    good: float
    good_ttft: float = 0.5
    good_tpot: float = 0.5


@given(
    needs=st.dictionaries(
        st.sampled_from([1, 2, 4]),
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=4),
        min_size=1,
    ),
    max_gpus=st.integers(1, 64),
    luck=st.integers(0, 2**32),
)
def test_the_fewest_gpus_are_found_whatever_the_sizes_that_suffice(needs, max_gpus, luck):
    """needs: for each size of a replica, pools that suffice, as all larger ones do, and by chance some smaller ones."""
    specs = [replace(small_cluster(1), replica_gpus=gpus) for gpus in needs]

    def good(replica_gpus: int, decode: int, prefill: int) -> float:
        kind = [need for need in needs[replica_gpus] if bool(need[1]) == bool(prefill)]
        below = min((max(0, d - decode) + max(0, p - prefill) for d, p in kind), default=9)
        chance = Random(f"{luck} {replica_gpus} {decode} {prefill}").uniform(0, 0.9 * CHANCE)
        return max(0.0, 0.95 - 0.03 * below - chance)

    def served(spec: ClusterSpec, trace: Trace) -> Served:
        return Served(spec.gpus, good(spec.replica_gpus, spec.replicas, spec.prefill_replicas))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.lab.simulator.planner.simulate", served)
        plan = Planner(specs, TRACE, max_gpus).plan()
    for found, split in ((plan.shared, False), (plan.split, True)):
        enough = [
            (decode + prefill) * gpus
            for gpus in needs
            for decode, prefill in sizes_within(max_gpus, gpus)
            if bool(prefill) == split and good(gpus, decode, prefill) >= SLO.fraction
        ]
        assert (found.gpus if found else None) == min(enough, default=None)


def planned_by(good: Callable[[int, int, int], float]) -> Plan:
    """Return the plan of up to 256 GPUs. good: fraction of good requests by GPUs of a replica, decode and prefill
    replicas."""

    def served(spec: ClusterSpec, trace: Trace) -> Served:
        return Served(spec.gpus, good(spec.replica_gpus, spec.replicas, spec.prefill_replicas))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.lab.simulator.planner.simulate", served)
        return Planner([replace(small_cluster(1), replica_gpus=gpus) for gpus in (2, 1, 4, 8)], TRACE, 256).plan()


def steep(gpus: int, decode: int, prefill: int) -> float:
    """Suffices with 20 GPUs that decode and 50 for prefills, or 70 for both."""
    share = min(gpus * decode / 20, gpus * prefill / 50) if prefill else gpus * decode / 70
    return min(1.0, share**4)


def level(gpus: int, decode: int, prefill: int) -> float:
    """A few requests are too slow on any replica."""
    return 0.86


def level_in_the_end(gpus: int, decode: int, prefill: int) -> float:
    return min(0.895, steep(gpus, decode, prefill))


@pytest.mark.parametrize(
    ("good", "fewest", "most_of_one_pool", "most"),
    [(steep, 69, 25, 90), (level, None, 25, 90), (level_in_the_end, None, 35, 120)],
)
def test_a_search_of_large_clusters_simulates_few_of_them(good, fewest, most_of_one_pool, most):
    plan = planned_by(good)
    assert [found and found.gpus for found in (plan.shared, plan.split)] == [fewest, fewest]
    assert sum(not candidate.prefill for candidate in plan.tried) <= most_of_one_pool and len(plan.tried) <= most
    assert not plan.unfinished


def test_a_search_among_near_misses_ends_and_names_the_sizes_of_a_replica(capsys):
    plan = planned_by(lambda gpus, decode, prefill: 0.895 - 1.5 / (decode + prefill))  # each doubling helps a little
    assert plan.best is None and plan.unfinished == [1, 2, 4]
    assert len(plan.tried) <= 150 * len(plan.replica_gpus)
    show_plan(replace(plan, tried=[]), SLO)
    assert "not searched to the end: replicas of 1, 2 or 4 GPUs" in capsys.readouterr().out


def test_no_cluster_keeps_what_no_engine_can():
    plan = Planner(clusters_of(GoodputSlo(ttft_s=0.3, tpot_s=0.001)), TRACE, 4).plan()
    assert plan.best is None


def test_the_command_prints_a_report_and_a_plan():
    options = ["simulate", "--requests", "60", "--trace", "fixed", "--rate", "20"]
    found = CliRunner().invoke(cli.app, [*options, "--replicas", "2", "--json"])
    assert found.exit_code == 0
    report = json.loads(found.stdout)
    assert report["completed"] == 60 and report["pools"]["decode"]["replicas"] == 2
    assert "first token within 2000 ms" in CliRunner().invoke(cli.app, options).stdout
    planned = CliRunner().invoke(cli.app, [*options, "--plan", "--prefill-replicas", "1"])
    assert planned.exit_code == 0
    said = " ".join(planned.stdout.split())
    assert (
        "take 1 replica of 1 GPU the fewest GPUs of all clusters of one pool or two with up to 256 GPUs, 1, 2, 4 or 8"
        in said
    )


def test_the_command_runs_a_trace_that_was_written(tmp_path):
    path = str(tmp_path / "t.jsonl")
    command = [sys.executable, "-m", "benchmarks.simulator.write_trace", "--trace", "mooncake", "--requests", "30"]
    assert "endless prefix cache" in subprocess.check_output([*command, "--output", path], text=True)
    found = CliRunner().invoke(cli.app, ["simulate", "--trace", path, "--requests", "20", "--json", "--autoscale", "6"])
    assert json.loads(found.stdout)["completed"] == 20


def test_options_that_mean_nothing_are_refused():
    for options in (["--router", "no"], ["--card", "no"], ["--model", "no"], ["--trace", "no"], ["--handoff", "no"]):
        assert CliRunner().invoke(cli.app, ["simulate", *options]).exception is not None

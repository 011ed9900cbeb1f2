"""What a simulated cluster costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.autoscaling.slo import Limits
from cluster.cli import main as cli
from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.simulator.cluster import Cluster, simulate
from cluster.lab.simulator.results import ReplicaCounts, most_at_a_time
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace, make_trace
from deployments.billing.prices import Prices
from engine.errors import InvalidParameter
from tests.cluster.lab.simulator.small_cluster import small_cluster

PRICES = Prices(engine_hour=4.0, kv_gib_hour=0.5)
TIGHT = Trace("tight", np.arange(12) * 0.01, np.full(12, 300), np.full(12, 150))


def priced(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, prices=PRICES)


def costs_of(spec: ClusterSpec, trace: Trace) -> Costs:
    costs = simulate(priced(spec), trace).costs
    assert costs is not None
    return costs


def test_engines_cost_their_price_in_every_hour_busy_or_not():
    trace = make_trace("fixed", 60, 10.0)
    report = simulate(priced(small_cluster(replicas=3)), trace)
    costs = report.costs
    assert costs is not None and costs.per_hour == pytest.approx(3 * 4.0)
    assert costs.per_request * 60 == pytest.approx(12.0 * report.duration_s / 3600)
    assert costs.wasted["idle"] == pytest.approx(1 - report.pools["decode"].busy)
    assert costs.saved_per_hour is None, "their number is fixed"


def test_the_costs_of_all_tokens_are_the_costs_of_the_engines():
    trace = make_trace("fixed", 60, 10.0)
    report = simulate(priced(small_cluster()), trace)
    assert report.costs is not None
    of_tokens = (
        report.costs.per_million_prompt_tokens * trace.prompt_tokens.sum()
        + report.costs.per_million_output_tokens * trace.output_tokens.sum()
    )
    assert of_tokens / 1e6 == pytest.approx(report.costs.per_request * 60)


@pytest.mark.parametrize("prefill", [0, 1])
def test_a_prompt_of_twice_the_length_leaves_the_costs_of_answers_alone(prefill):
    short, long = (Trace("some", np.arange(20) * 0.2, np.full(20, prompt), np.full(20, 40)) for prompt in (200, 400))
    meters = []
    for trace in (short, long):
        cluster = Cluster(priced(small_cluster(prefill, replicas=1)), trace)
        cluster.run()
        cluster.report()
        engines = [replica.meter for pool in cluster.pools.values() for replica in pool.replicas]
        meters.append([engine for engine in engines if isinstance(engine, EngineMeter)])
    prompts, answers = (
        [sum(engine.prompt_ns for engine in engines) for engines in meters],
        [sum(engine.ledger.ns["requests"] - engine.prompt_ns for engine in engines) for engines in meters],
    )
    assert prompts[1] > 1.4 * prompts[0]
    assert answers[1] == pytest.approx(answers[0], rel=0.15)


def test_what_is_computed_again_after_a_preemption_is_wasted():
    tight, roomy = (costs_of(small_cluster(num_blocks=n, enable_prefix_caching=False), TIGHT) for n in (60, 400))
    assert tight.wasted["preemption"] > 0 == roomy.wasted["preemption"]


@pytest.mark.parametrize("spec", [small_cluster(), small_cluster(1), small_cluster(num_blocks=60)])
def test_the_time_of_every_engine_is_in_one_line_and_many_steps_at_once_change_none(spec):
    lines = []
    for fast_forward in (0, 64):
        cluster = Cluster(priced(spec), TIGHT, fast_forward=fast_forward)
        cluster.run()
        cluster.report()
        for pool in cluster.pools.values():
            for replica in pool.replicas:
                assert isinstance(replica.meter, EngineMeter)
                ledger = replica.meter.ledger
                assert sum(ledger.ns.values()) == ledger.wall_ns
                assert ledger.wall_ns / 1e9 == pytest.approx(cluster.results.duration_s, abs=1e-6)
                assert (ledger.ns["requests"] + ledger.ns["preemption"]) / 1e9 == pytest.approx(replica.busy_s)
                lines += ledger.ns.values()
    half = len(lines) // 2
    assert lines[:half] == pytest.approx(lines[half:], rel=1e-3, abs=2e-3 * max(lines)), "learned costs differ a little"


def test_bills_are_the_price_of_the_steps_and_of_kv():
    trace = make_trace("fixed", 60, 10.0)
    report = simulate(priced(small_cluster(replicas=1)), trace)
    without_kv = simulate(replace(small_cluster(replicas=1), prices=Prices(engine_hour=4.0)), trace)
    assert report.costs is not None and without_kv.costs is not None
    assert without_kv.costs.billed_per_hour == pytest.approx(4.0 * report.pools["decode"].busy)
    assert report.costs.billed_per_hour > without_kv.costs.billed_per_hour
    assert report.costs.per_hour == without_kv.costs.per_hour


def test_an_autoscaled_cluster_says_what_it_saves_and_pays_for_starting():
    trace = Trace("burst", np.concatenate([np.arange(80) * 0.01, [60.0]]), np.full(81, 400), np.full(81, 100))
    limits = Limits(
        min_replicas=1,
        max_replicas=4,
        max_num_seqs=8,
        upscale_delay_s=0.0,
        downscale_delay_s=5.0,
        scale_to_zero_delay_s=1e9,
    )
    report = simulate(replace(priced(small_cluster(replicas=1)), limits=limits, startup_s=0.5), trace)
    costs, scaled = report.costs, report.pools["decode"].scaled
    assert costs is not None and scaled is not None and scaled.max > 1
    assert costs.saved_per_hour == pytest.approx(scaled.max * 4.0 - costs.per_hour) and costs.saved_per_hour > 0
    assert costs.wasted["starting"] > 0


def test_a_replica_that_changes_its_role_is_one_replica():
    decode, prefill = (
        ReplicaCounts(min=1, max=3, mean=2.0, wanted=3, sizes=sizes)
        for sizes in ([(0.0, 3), (5.0, 1)], [(0.0, 1), (5.0, 3), (9.0, 2)])
    )
    assert most_at_a_time([decode, prefill]) == 4


def test_without_prices_nothing_is_measured():
    cluster = Cluster(small_cluster(), make_trace("fixed", 10, 10.0))
    cluster.run()
    assert cluster.report().costs is None
    assert not any(isinstance(replica.meter, EngineMeter) for replica in cluster.pools["decode"].replicas)


FIXED = ["simulate", "--requests", "40", "--trace", "fixed", "--rate", "20"]


def run(*options: str) -> str:
    found = CliRunner().invoke(cli.app, [*FIXED, *options, *([] if "--plan" in options else ["--replicas", "2"])])
    assert found.exit_code == 0, found.exception
    return found.stdout


def test_the_command_tells_costs_if_it_is_given_prices():
    assert "cost" not in run()
    table = run("--engine-hour", "4.2", "--kv-gib-hour", "0.002")
    assert "cost per hour" in table and "8.40" in table and "wasted (idle), %" in table
    assert json.loads(run("--engine-hour", "4.2", "--json"))["costs"]["per_hour"] == pytest.approx(8.4)
    planned = run("--gpu-hour", "2.1", "--tensor-parallel-size", "2", "--plan")
    assert "take 1 replica of 2 GPUs: 4.20 per hour" in planned and "what it costs" in planned
    assert "what it costs" not in run("--plan")


def test_the_price_of_an_engine_is_given_once_and_not_before_its_cards_are_known():
    both, unknown = ("--engine-hour", "4", "--gpu-hour", "4"), ("--engine-hour", "4", "--plan")
    for options, said in ((both, "left out with --gpu-hour"), (unknown, "left out for --gpu-hour")):
        error = CliRunner().invoke(cli.app, [*FIXED, *options]).exception
        assert isinstance(error, InvalidParameter) and said in str(error)
    assert CliRunner().invoke(cli.app, [*FIXED, "--engine-hour", "-1"]).exit_code != 0

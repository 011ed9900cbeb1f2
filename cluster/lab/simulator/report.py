"""The results of a simulation as tables, and as a page with charts."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from cluster.lab.simulator.billing.cost_tables import cost_rows, cost_table
from cluster.lab.simulator.planner import CHANCE, LEVEL, NEAR_MISSES, Candidate, Plan
from cluster.lab.simulator.results import PoolUse, Report
from cluster.lab.simulator.spec import GoodputSlo
from cluster.terminal.html_report import Chart, distribution, rate_over_time, steps_over_time, write_report
from cluster.terminal.tables import Total, distributions, figure, make_table, show, totals


def show_report(report: Report, slo: GoodputSlo) -> None:
    rows: list[Total] = [
        ("requests", report.requests, 0),
        ("refused", report.refused, 0),
        ("simulated time, s", report.duration_s, 1),
        ("requests/s", report.requests_per_s, 2),
        ("output tokens/s", report.output_tokens_per_s, 0),
        ("goodput, requests/s", report.goodput, 2),
        ("good requests, %", 100 * report.good, 1),
        ("prompt tokens cached, %", 100 * report.hit_rate, 1),
        ("GPUs at the start", report.gpus, 0),
    ]
    if report.handoffs is not None:
        rows += [
            ("prompts handed over", report.handoffs.count, 0),
            ("KV sent, GB", report.handoffs.gigabytes, 1),
            ("links busy, %", 100 * report.handoffs.link_busy, 1),
        ]
    if report.tiers is not None:
        rows.append(("prompt tokens from tiers", report.tiers.loaded_tokens, 0))
        for tier, loaded in report.tiers.gigabytes_loaded.items():
            rows += [
                (f"KV to {tier}, GB", report.tiers.gigabytes_stored[tier], 1),
                (f"KV from {tier}, GB", loaded, 1),
            ]
    if report.moves is not None:
        rows += [("requests moved", report.moves.count, 0), ("KV moved with them, GB", report.moves.gigabytes, 1)]
    if report.costs is not None:
        rows += cost_rows(report.costs)
    title = f"{report.trace}, simulated in {report.took_s:.1f} s"
    show(title, totals(rows), _latencies(report), _pools(report), str(slo), *_never_up(report))


def show_plan(plan: Plan, slo: GoodputSlo) -> None:
    tried = sorted(plan.tried, key=lambda c: (bool(c.prefill), c.gpus, c.prefill))
    table = make_table("cluster", "GPUs", "good, %", "TTFT p90, ms", "TPOT p90, ms", "busy, %")
    for candidate in tried:
        report = candidate.report
        busy = " / ".join(figure(100 * use.busy, 0) for use in report.pools.values())
        table.add_row(
            candidate.name,
            str(report.gpus),
            figure(100 * report.good),
            figure(report.ttft_ms.p90 if report.ttft_ms else None),
            figure(report.tpot_ms.p90 if report.tpot_ms else None, 2),
            busy,
        )
    show("what was tried", table, str(slo))
    if priced := {c.name: c.report.costs for c in tried if c.report.costs is not None}:
        show("what it costs", cost_table(priced))
    show(f"one pool: {_found(plan.shared)}")
    if any(candidate.prefill for candidate in plan.tried):
        show(f"two pools: {_found(plan.split)}")
    else:
        show("two pools: not tried; try them with --prefill-replicas 1")
    if plan.unfinished:
        show(
            f"not searched to the end: replicas of {_listed(plan.unfinished)} GPUs, of which {NEAR_MISSES} clusters in "
            f"a row missed the SLO by no more than {100 * CHANCE:g} % of the requests"
        )
    if plan.best is None:
        show("no cluster within the allowed number of GPUs meets the SLO")
    else:
        costs = plan.best.report.costs
        told = (
            ""
            if costs is None
            else f": {costs.per_hour:,.2f} per hour, {100 * sum(costs.wasted.values()):.0f} % wasted"
        )
        show(f"take {plan.best.name}{told}", _range(plan))


def _range(plan: Plan) -> str:
    """Return among which clusters the plan has fewest GPUs."""
    pools = "one pool or two" if any(candidate.prefill for candidate in plan.tried) else "one pool"
    return (
        f"the fewest GPUs of all clusters of {pools} with up to {plan.max_gpus} GPUs, {_listed(plan.replica_gpus)} for "
        f"each replica, if more replicas of a pool never lower the good requests by more than {100 * CHANCE:g} %, and "
        f"if no number helps where twice the replicas change them by less than {100 * LEVEL:g} %"
    )


def _listed(sizes: list[int]) -> str:
    *others, last = [str(size) for size in sizes]
    return f"{', '.join(others)} or {last}" if others else last


def _found(candidate: Candidate | None) -> str:
    return f"{candidate.name}, {candidate.gpus} in all" if candidate else "none is good enough"


def _latencies(report: Report) -> Table:
    rows = [("TTFT", report.ttft_ms, 2), ("TPOT", report.tpot_ms, 2), ("E2E", report.e2e_ms, 2)]
    table = distributions("ms", ("mean", "p50", "p90", "p99"), rows)
    table.add_row("ITL", "-", figure(report.itl_p50_ms, 2), "-", figure(report.itl_p99_ms, 2))
    return table


def _pools(report: Report) -> Table:
    table = make_table("pool", "replicas", "busy, %", "steps", "preemptions", "GPU hours")
    for role, use in report.pools.items():
        counts = figure(use.steps, 0), figure(use.preemptions, 0)
        table.add_row(role, _replicas(use), figure(100 * use.busy), *counts, figure(use.gpu_hours, 3))
    return table


def _replicas(use: PoolUse) -> str:
    if (scaled := use.scaled) is None or scaled.min == scaled.max:
        return str(scaled.max if scaled else use.replicas)
    return f"{scaled.min} to {scaled.max}, mean {scaled.mean:.1f}"


def _never_up(report: Report) -> list[str]:
    """Return a note for each pool that never had as many replicas as the autoscaler wanted."""
    return [
        f"{role}: the autoscaler wanted up to {use.scaled.wanted} replicas, but at most {use.scaled.max} were up "
        "in time; raise --requests to simulate a longer time"
        for role, use in report.pools.items()
        if use.scaled is not None and use.scaled.wanted > use.scaled.max
    ]


def write_simulation_report(path: Path, report: Report) -> None:
    series = report.series
    charts: list[Chart] = [
        distribution("Time to first token", "ms", (1e3 * series.ttft_s).tolist()),
        distribution("Time to the end", "ms", (1e3 * series.e2e_s).tolist()),
        rate_over_time(
            "Output", "tokens/s", list(zip(series.ended_at, series.output_tokens, strict=True)), report.duration_s
        ),
    ]
    for role, use in report.pools.items():
        if use.scaled is not None:
            charts.append(steps_over_time(f"Replicas of {role}", "replicas", use.scaled.sizes, report.duration_s))
    figures = [
        ("requests", f"{report.requests}, {report.refused} refused"),
        ("requests/s", figure(report.requests_per_s, 2)),
        ("output tokens/s", figure(report.output_tokens_per_s)),
        ("good requests", f"{report.good:.1%}"),
        ("prompt tokens cached", f"{report.hit_rate:.1%}"),
        ("GPUs at the start", str(report.gpus)),
    ]
    write_report(path, f"{report.trace}, simulated", figures, charts)

"""`manta simulate`: runs the simulation described by its flags, and prints the results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cluster.cli.money import cost_rows, cost_table
from cluster.flags import HtmlOption, JsonOption, with_flags
from cluster.simulator.options import SimulationOptions
from cluster.terminal.tables import Total, distributions, figure, make_table, show, totals
from engine.errors import InvalidParameter

if TYPE_CHECKING:  # `manta --help` need not wait for numpy and torch
    from cluster.simulator.planner import Candidate, Plan
    from cluster.simulator.results import PoolUse, Report
    from cluster.simulator.spec import GoodputSlo
    from cluster.simulator.trace import Trace


@with_flags
def simulate(
    options: SimulationOptions,
    plan: Annotated[
        bool, typer.Option("--plan", help="Find the fewest GPUs that meet the limits, with one pool or two.")
    ] = False,
    max_gpus: Annotated[int, typer.Option(min=1, help="Maximum number of GPUs for --plan.")] = 256,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Run traffic on a simulated cluster, to find how many replicas it needs and how to split them into pools.

    The schedulers, block pools, routers and the autoscaler are the real ones. The time of a step is computed from data
    sheets, or measured once (--cost). docs/simulator.md states how far results are from a real cluster.

    Examples:

    manta simulate --trace azure-code --rate 40 --replicas 4

    manta simulate --trace mooncake --rate 8 --replicas 16 --router random

    manta simulate --trace azure-conversation --rate 60 --plan --prefill-replicas 1
    """
    from cluster.simulator.cluster import simulate as simulate_cluster
    from cluster.simulator.planner import Planner
    from cluster.simulator.results import figures
    from cluster.simulator.spec import check_plan, find_trace, make_cluster
    from cluster.terminal.progress import progress_bar

    if plan:
        if html is not None:
            raise InvalidParameter("--html", str(html), "left out with --plan, which has no single run to show")
        check_plan(options, max_gpus)
    traffic = find_trace(options)
    if plan and options.tensor_parallel_size is None and options.cost is None:
        options, told = with_layout(options, traffic, max_gpus)
        if not as_json:
            show("layouts of a replica, by formulas", *told)
    spec = make_cluster(options, traffic)
    with progress_bar() as progress:
        if plan:
            task = progress.add_task("searching", total=None)

            def on_result(candidate: Candidate) -> None:
                progress.update(task, advance=1, description=f"{candidate.name}: {candidate.report.good:.0%} good")

            found = Planner(spec, traffic, max_gpus, on_result).plan()
        else:
            task = progress.add_task("requests", total=len(traffic))
            report = simulate_cluster(spec, traffic, lambda done: progress.update(task, completed=done))
    if html is not None:
        from cluster.cli.bench.charts import write_simulation_report

        write_simulation_report(html, report)
    if as_json:
        print(json.dumps(figures(found if plan else report)))
    elif plan:
        show_plan(found, spec.slo)
    else:
        show_report(report, spec.slo)
    raise typer.Exit(1 if plan and found.best is None else 0)


def with_layout(options: SimulationOptions, traffic: Trace, max_gpus: int) -> tuple[SimulationOptions, list[str]]:
    """Return the options with the best layout of a replica, and what there is to say about it. The simulator knows
    only tensor parallel ranks inside a machine, so other layouts are named, and not simulated."""
    from cluster.cli.layouts import find_layouts, lines, machines_of
    from cluster.planning.layouts import Workload
    from cluster.simulator.cost_model import find_card, find_model

    cards = max_gpus // (2 if options.prefill_replicas else 1)  # of each pool
    nodes, devices = max(1, cards // options.cards_per_node), min(options.cards_per_node, cards)
    machines = machines_of(find_card(options.card), nodes, devices, options.network_gbit)
    load = Workload(traffic.mean, traffic.longest, options.tpot_ms / 1000, options.max_num_seqs)
    found = find_layouts(find_model(options.model), machines, load)
    known = next(layout for layout in found if layout.ranks == layout.tensor and layout.tensor_inside)
    told = lines(found, load)
    if known is not found[0]:
        told.append(f"simulated: {known.name}, because the simulator knows neither stages nor sums between machines")
    return replace(options, tensor_parallel_size=known.tensor), told


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
    if plan.best is None:
        show("no cluster within the allowed number of GPUs meets the SLO")
    else:
        costs = plan.best.report.costs
        told = (
            ""
            if costs is None
            else f": {costs.per_hour:,.2f} per hour, {100 * sum(costs.wasted.values()):.0f} % wasted"
        )
        show(f"take {plan.best.name}{told}")


def _found(candidate: Candidate | None) -> str:
    return f"{candidate.name}, {candidate.gpus} GPUs" if candidate else "none is good enough"


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

"""`manta simulate`: runs the simulation described by its flags, and prints the results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.config.simulation_options import SimulationOptions
from cluster.flags import HtmlOption, JsonOption, with_flags

if TYPE_CHECKING:  # `manta --help` need not wait for numpy and torch
    from cluster.lab.simulator.planner import Candidate

MAX_GPUS = 256


@with_flags
def simulate(
    options: SimulationOptions,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Find the fewest GPUs that meet the limits: among all numbers of replicas of one pool, or two, and of "
            "cards per replica.",
        ),
    ] = False,
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help=f"Maximum number of GPUs for --plan. Default: {MAX_GPUS}.")
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Run traffic on a simulated cluster, to find how many replicas it needs and how to split them into pools.

    The schedulers, block pools, routers and the autoscaler are the real ones. The time of a step is computed from data
    sheets, or measured once (--cost). docs/simulator.md states how far results are from a real cluster.

    Examples:

    manta simulate --trace azure-code --rate 40 --replicas 4

    manta simulate --trace mooncake --rate 8 --replicas 16 --router random

    manta simulate --trace azure-conversation --rate 60 --requests 6000 --plan --prefill-replicas 1
    """
    from cluster.lab.idle_flags import check_simulate
    from cluster.lab.planning.known_models import replica_sizes
    from cluster.lab.simulator.cluster import simulate as simulate_cluster
    from cluster.lab.simulator.planner import Planner
    from cluster.lab.simulator.report import show_plan, show_report, write_simulation_report
    from cluster.lab.simulator.results import figures
    from cluster.lab.simulator.spec import check_plan, find_trace, make_cluster, make_clusters
    from cluster.terminal.progress import progress_bar
    from cluster.terminal.tables import show

    check_simulate(options, plan, max_gpus, html)
    limit = max_gpus or MAX_GPUS
    if plan:
        check_plan(options, limit)
    traffic = find_trace(options)
    if plan and options.tensor_parallel_size is None and options.cost is None:
        sizes, told = replica_sizes(options, traffic, limit)
        if not as_json:
            show("layouts of a replica, by formulas", *told)
        specs = make_clusters(options, traffic, sizes)
    else:
        specs = [make_cluster(options, traffic)]
    with progress_bar() as progress:
        if plan:
            task = progress.add_task("searching", total=None)

            def on_result(candidate: Candidate) -> None:
                progress.update(task, advance=1, description=f"{candidate.name}: {candidate.report.good:.0%} good")

            found = Planner(specs, traffic, limit, on_result).plan()
        else:
            task = progress.add_task("requests", total=len(traffic))
            report = simulate_cluster(specs[0], traffic, lambda done: progress.update(task, completed=done))
    if html is not None:
        write_simulation_report(html, report)
    if as_json:
        print(json.dumps(figures(found if plan else report)))
    elif plan:
        show_plan(found, specs[0].slo)
    else:
        show_report(report, specs[0].slo)
    raise typer.Exit(1 if plan and found.best is None else 0)

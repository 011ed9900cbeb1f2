"""The commands of `manta simulate`. Each imports what it needs by itself: `manta --help` should not wait for it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cluster.flags import with_flags
from cluster.simulator.options import SimulationOptions, TraceOptions

simulate = typer.Typer(invoke_without_command=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")]


@simulate.callback()
@with_flags
def run(
    context: typer.Context,
    options: SimulationOptions,
    plan: Annotated[
        bool, typer.Option("--plan", help="Search the fewest GPUs that are good enough, and the split of two pools.")
    ] = False,
    max_gpus: Annotated[int, typer.Option(min=1, help="GPUs that --plan may use.")] = 256,
    as_json: JsonOption = False,
) -> None:
    """Run traffic on a cluster that exists only on paper: how many replicas, and which split, does it take?

    The schedulers, block pools, routers and the autoscaler are the real ones; what a step of an engine takes is
    computed from data sheets, or measured once by `manta simulate fit`. How far off that is: docs/simulator.md.

    Examples:

    manta simulate --trace azure-code --rate 40 --replicas 4

    manta simulate --trace mooncake --rate 8 --replicas 16 --router random

    manta simulate --trace azure-conversation --rate 60 --plan --prefill-replicas 1
    """
    if context.invoked_subcommand is not None:
        return
    from cluster.cli.bench.progress import progress_bar
    from cluster.simulator.cluster import simulate as simulate_cluster
    from cluster.simulator.planner import Candidate, Planner
    from cluster.simulator.spec import check_plan, find_trace, make_cluster, make_slo
    from cluster.simulator.tables import show_plan, show_report

    slo, traffic = make_slo(options), find_trace(options)
    if plan:
        check_plan(options, max_gpus)
    spec = make_cluster(options, traffic)
    with progress_bar() as progress:
        if plan:
            task = progress.add_task("searching", total=None)

            def on_result(candidate: Candidate) -> None:
                progress.update(task, advance=1, description=f"{candidate.name}: {candidate.report.good:.0%} good")

            found = Planner(spec, traffic, slo, max_gpus, on_result).plan()
        else:
            task = progress.add_task("requests", total=len(traffic))
            report = simulate_cluster(spec, traffic, slo, lambda done: progress.update(task, completed=done))
    if plan:
        print_json(asdict(found)) if as_json else show_plan(found, slo)
        raise typer.Exit(0 if found.best else 1)
    print_json(asdict(report)) if as_json else show_report(report, slo)


@simulate.command()
def fit(
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for `manta simulate --cost`.")],
    model: Annotated[str, typer.Option(help="`pocket`, a Hugging Face model folder, or a Hub id.")] = "pocket",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that one step may compute.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at a time.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=64, help="Longest prompt + answer, in tokens.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Learn what the steps of this machine's engine take.

    Example: manta simulate fit --model pocket --output cost.json
    """
    from cluster.cli.bench.progress import progress_bar
    from cluster.simulator.calibration import BATCHES, PROMPTS, fit_cost, measure_steps
    from cluster.simulator.tables import show_fit
    from engine.config import EngineConfig
    from engine.core.engine import EngineCore

    config = EngineConfig(
        model=model, dtype=dtype, num_threads=threads, max_num_batched_tokens=max_num_batched_tokens,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, overlap=False, enable_prefix_caching=False,
    )  # fmt: skip
    with progress_bar() as progress:
        task = progress.add_task("batches", total=len(BATCHES) * len(PROMPTS))
        core = EngineCore.build(config)
        try:
            found = fit_cost(*measure_steps(core, progress=lambda: progress.advance(task)))
        finally:
            core.close()
    found.write(output)
    print_json(asdict(found)) if as_json else show_fit(found)


@simulate.command(name="trace")
@with_flags
def write_trace(
    options: TraceOptions,
    output: Annotated[Path, typer.Option(dir_okay=False, help="JSON lines, in Mooncake's format.")],
) -> None:
    """Write synthetic traffic to a file, for other tools or for a look at it.

    Example: manta simulate trace --trace mooncake --requests 10000 --output trace.jsonl
    """
    from cluster.simulator.spec import find_trace
    from cluster.simulator.tables import show_trace

    found = find_trace(options)
    found.write(output)
    show_trace(found)


def print_json(content: object) -> None:
    json.dump(content, sys.stdout)
    print()

"""`manta tune`: finds the options that serve a load best, by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.config.tune_options import TuneOptions
from cluster.flags import JsonOption, with_flags

if TYPE_CHECKING:  # `manta --help` need not wait for numpy and torch
    from cluster.lab.simulator.tuning.search import Trial


@with_flags
def tune(
    options: TuneOptions,
    tape: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="File of `manta tape save`; may be given several times."),
    ] = None,
    objective: Annotated[
        Literal["goodput", "cost"],
        typer.Option(
            help="`goodput`: most requests within both latency targets. `cost`: fewest GPUs with which --good of the "
            "requests are within them."
        ),
    ] = "goodput",
    max_gpus: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of GPUs (of replicas, on a CPU). Default: as many as now.")
    ] = None,
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="Values of an option to try, such as `num_gpu_blocks_override=500,1000`, in place of the usual ones.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the options that serve a load best, and print them as keys of serve_config.yaml with their expected effect.

    With --tape, the load, the cluster and the cost of its steps are those of a tape, and the error of the simulation is
    known. With --tape and --trace, the load is another one. With --trace alone, the cluster is described by flags, as
    for `manta simulate`. docs/replay.md says what is tried. Exit code 1 if `cost` finds nothing that is good enough.

    Example: manta tune --tape monday.tape --ttft-ms 500 --tpot-ms 40

    Example: manta tune --trace azure-code --rate 40 --replicas 4 --objective cost
    """
    from cluster.lab.idle_flags import check_tune
    from cluster.lab.simulator.spec import requests_of
    from cluster.lab.simulator.tuning.search import Tuner, make_grid
    from cluster.lab.tune import Result, make_start, parse_values, show_result, simulated
    from cluster.terminal.progress import progress_bar
    from cluster.terminal.tables import show

    check_tune(options, objective, bool(tape))
    start = make_start(options, tape or [])
    limit = start.spec.gpus if max_gpus is None else max_gpus
    grid = make_grid(start.spec, limit, [pair for text in try_ or [] for pair in parse_values(text)])
    searched = start.trace.busiest(requests_of(options, start.trace))
    with progress_bar() as progress:
        task = progress.add_task("simulating", total=None)

        def on_trial(trial: Trial) -> None:
            told = ", ".join(f"{name}={value}" for name, value in trial.changes.items()) or "as it is"
            progress.update(task, advance=1, description=f"{told}: {trial.report.good:.0%} good")

        tuner = Tuner(start.spec, searched, objective, limit, grid, on_trial)
        best = tuner.tune()
        result = Result(
            start, best, tuner.num_tried, *(simulated(spec, start.trace) for spec in (start.spec, best.spec))
        )
    if as_json:
        print(json.dumps(result.figures()))
    else:
        show_result(result)
    fails = objective == "cost" and not tuner.is_good_enough(best)
    if fails and not as_json:
        show(f"no cluster with up to {limit} GPUs was found with which {options.good:.0%} of the requests are good")
    raise typer.Exit(int(fails))

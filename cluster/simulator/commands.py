"""`manta simulate`: the commands. Each imports what it needs by itself: `manta --help` should not wait for it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import InvalidParameter

if TYPE_CHECKING:
    from rich.progress import Progress

    from cluster.simulator.cost_model import Fit
    from cluster.simulator.http_calibration import HttpFit
    from cluster.simulator.trace import Trace
    from engine.config import EngineConfig

simulate = typer.Typer(invoke_without_command=True)

TRAFFIC, CLUSTER, ENGINE, GOAL = "Traffic", "Cluster", "Engine", "What is good enough"
DEFAULT_RATE = 10.0

TraceOption = Annotated[
    str,
    typer.Option(
        rich_help_panel=TRAFFIC,
        help="azure-conversation, azure-code, mooncake, shared-prefix, fixed (512 in, 64 out), or a file of JSON lines "
        "in Mooncake's format: timestamp (ms), input_length, output_length and maybe hash_ids (one per 512 tokens).",
    ),
]
RequestsOption = Annotated[int, typer.Option(min=1, rich_help_panel=TRAFFIC, help="Of a file, the first so many.")]
RateOption = Annotated[
    float | None,
    typer.Option(rich_help_panel=TRAFFIC, help="Requests per second; default: 10, and of a file its own times."),
]
BurstinessOption = Annotated[
    float, typer.Option(rich_help_panel=TRAFFIC, help="1 is a Poisson process, below 1 requests come in bursts.")
]
SeedOption = Annotated[int, typer.Option(rich_help_panel=TRAFFIC, help="Equal seeds give equal traces and results.")]


@simulate.callback()
def run(
    context: typer.Context,
    trace: TraceOption = "azure-conversation",
    requests: RequestsOption = 2000,
    rate: RateOption = None,
    burstiness: BurstinessOption = 1.0,
    seed: SeedOption = 0,
    replicas: Annotated[
        int, typer.Option(min=1, rich_help_panel=CLUSTER, help="That answer requests; with --plan it is searched.")
    ] = 4,
    prefill_replicas: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=CLUSTER,
            help="That compute prompts for them. With --plan: 0 tries one pool only, more tries two pools as well.",
        ),
    ] = 0,
    router: Annotated[
        str, typer.Option(rich_help_panel=CLUSTER, help="prefix_aware, power_of_two, round_robin or random.")
    ] = "prefix_aware",
    handoff: Annotated[
        str,
        typer.Option(
            rich_help_panel=CLUSTER, help="always, or auto: as the engines' own weighing decides. For two pools."
        ),
    ] = "always",
    network_gbit: Annotated[
        float | None,
        typer.Option(rich_help_panel=CLUSTER, help="Per replica, for KV; default: that of its cards."),
    ] = None,
    autoscale: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=CLUSTER,
            help="Begin with --replicas, and let the autoscaler use up to so many in each pool; not with --plan.",
        ),
    ] = None,
    startup_s: Annotated[
        float, typer.Option(min=0, rich_help_panel=CLUSTER, help="Until a new replica takes requests.")
    ] = 60.0,
    model: Annotated[
        str,
        typer.Option(
            rich_help_panel=ENGINE,
            help="llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-32b, opt-13b, or a folder with a config.json.",
        ),
    ] = "llama-3.1-8b",
    card: Annotated[str, typer.Option(rich_help_panel=ENGINE, help="a100, h100, h200 or l4.")] = "h100",
    tensor_parallel: Annotated[int, typer.Option(min=1, rich_help_panel=ENGINE, help="Cards per replica.")] = 1,
    cost: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            rich_help_panel=ENGINE,
            help="What steps cost, as measured by `manta simulate fit`; in place of what the data sheets say.",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="KV blocks of a replica; default: what fits.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, rich_help_panel=ENGINE, help="Tokens per KV block.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, rich_help_panel=ENGINE, help="Tokens that one step may compute: the prompt chunk.")
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, rich_help_panel=ENGINE, help="That run at a time.")] = 256,
    prefix_caching: Annotated[
        bool, typer.Option(rich_help_panel=ENGINE, help="Reuse the KV of equal prefixes.")
    ] = True,
    ttft_ms: Annotated[float, typer.Option(rich_help_panel=GOAL, help="To the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(rich_help_panel=GOAL, help="Mean time per token after it.")] = 50.0,
    good: Annotated[
        float, typer.Option(min=0, max=1, rich_help_panel=GOAL, help="Share of requests that must keep both.")
    ] = 0.9,
    plan: Annotated[
        bool, typer.Option("--plan", help="Search the fewest GPUs that are good enough, and the split of two pools.")
    ] = False,
    max_gpus: Annotated[int, typer.Option(min=1, help="For --plan.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")] = False,
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
    from cluster.simulator.setup import ClusterOptions, check_plan, make_cluster, make_slo
    from cluster.simulator.tables import name, show_plan, show_report

    slo = make_slo(ttft_ms, tpot_ms, good)
    traffic = find_trace(trace, requests, rate, burstiness, seed)
    options = ClusterOptions(
        replicas=replicas, prefill_replicas=prefill_replicas, router=router, handoff=handoff,
        network_gbit=network_gbit, model=model, card=card, tensor_parallel=tensor_parallel, cost=cost,
        num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs, prefix_caching=prefix_caching, autoscale=autoscale, startup_s=startup_s, seed=seed,
    )  # fmt: skip
    if plan:
        check_plan(options, max_gpus)
    spec = make_cluster(options, traffic, slo)
    with progress_bar() as progress:
        if plan:
            task = progress.add_task("searching", total=None)

            def on_result(candidate: Candidate) -> None:
                progress.update(task, advance=1, description=f"{name(candidate)}: {candidate.report.good:.0%} good")

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
    output: Annotated[Path, typer.Option(dir_okay=False, help="For `manta simulate --cost`.")],
    model: Annotated[str, typer.Option(help="`pocket`, a Hugging Face model folder, or a Hub id.")] = "pocket",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that one step may compute.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at a time.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=64, help="Longest prompt + answer, in tokens.")] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Of a running cluster, to fit that in place of an engine of this machine: its steps, and what HTTP "
            "adds. Nobody else should use it meanwhile.",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Of the running cluster.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")] = False,
) -> None:
    """Learn what the steps of this machine's engine take, or of a running cluster's.

    Examples:

    manta simulate fit --model pocket --output cost.json

    manta simulate fit --base-url http://127.0.0.1:8000 --replicas 2 --output cost.json
    """
    from cluster.cli.bench.progress import progress_bar
    from cluster.simulator.cost_file import write_cost
    from cluster.simulator.tables import show_fit
    from engine.config import EngineConfig

    with progress_bar() as progress:
        if base_url is not None:
            found: Fit | HttpFit = _fit_cluster(base_url, replicas, max_num_batched_tokens, progress)
        else:
            config = EngineConfig(
                model=model, dtype=dtype, num_threads=threads, max_num_batched_tokens=max_num_batched_tokens,  # type: ignore[arg-type]
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, overlap=False, enable_prefix_caching=False,
            )  # fmt: skip
            found = _fit_engine(config, progress)
    write_cost(found, output)
    print_json(asdict(found)) if as_json else show_fit(found)


def _fit_engine(config: EngineConfig, progress: Progress) -> Fit:
    from cluster.simulator.calibration import BATCHES, PROMPTS, measure_steps
    from cluster.simulator.cost_model import fit as fit_cost
    from engine.core.engine import EngineCore

    task = progress.add_task("batches", total=len(BATCHES) * len(PROMPTS))
    core = EngineCore(config)
    try:
        return fit_cost(*measure_steps(core, progress=lambda: progress.advance(task)))
    finally:
        core.close()


def _fit_cluster(base_url: str, replicas: int, budget: int, progress: Progress) -> HttpFit:
    import asyncio

    from cluster.simulator.http_calibration import fit_cluster, probes

    task = progress.add_task("probes", total=len(probes(replicas)))
    return asyncio.run(fit_cluster(base_url, replicas, budget, progress=lambda: progress.advance(task)))


@simulate.command(name="trace")
def write_trace(
    output: Annotated[Path, typer.Option(dir_okay=False, help="JSON lines, in Mooncake's format.")],
    trace: TraceOption = "azure-conversation",
    requests: RequestsOption = 2000,
    rate: RateOption = None,
    burstiness: BurstinessOption = 1.0,
    seed: SeedOption = 0,
) -> None:
    """Write synthetic traffic to a file, for other tools, or to be looked at.

    Example: manta simulate trace --trace mooncake --requests 10000 --output trace.jsonl
    """
    from cluster.simulator.tables import show_trace

    found = find_trace(trace, requests, rate, burstiness, seed)
    found.write(output)
    show_trace(found)


def find_trace(name: str, requests: int, rate: float | None, burstiness: float, seed: int) -> Trace:
    """Raises InvalidParameter."""
    from cluster.simulator.synthetic import KINDS, make_trace
    from cluster.simulator.trace import Trace

    if name in KINDS:
        return make_trace(name, requests, DEFAULT_RATE if rate is None else rate, burstiness=burstiness, seed=seed)
    if not Path(name).is_file():
        raise InvalidParameter("trace", name, f"a file, or one of {', '.join(KINDS)}")
    found = Trace.read(Path(name)).first(requests)
    return found if rate is None else found.at_rate(rate)


def print_json(content: object) -> None:
    json.dump(content, sys.stdout)
    print()

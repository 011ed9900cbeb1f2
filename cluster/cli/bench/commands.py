"""The commands of `manta bench`. Each imports what it needs by itself, since `manta --help` should not take seconds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from cluster.cli.bench.load import OfflineLoad, ServeLoad
from cluster.flags import ApiKeyOption, EngineFlags, HtmlOption, JsonOption, ModelOption, with_flags
from engine.errors import InvalidParameter

bench = typer.Typer(no_args_is_help=True, help="Measure a server, or an engine alone.")


@bench.command()
@with_flags
def offline(
    load: OfflineLoad,
    engine: EngineFlags,
    model: ModelOption = "pocket",
    as_json: JsonOption = False,
) -> None:
    """Throughput and latency of the engine alone, in this process.

    Greedy, and always to the full length. With --requests 1 the two latencies are those of a single stream; with more,
    requests wait for one another.

    Example: manta bench offline --requests 1 --output-len 128
    """
    from cluster.cli.bench.offline import measure
    from cluster.cli.bench.progress import progress_bar
    from cluster.cli.bench.tables import show_offline

    with progress_bar() as progress:
        report = measure(load, model=model, progress=progress, **engine)
    if as_json:
        print(json.dumps(asdict(report), allow_nan=False))
    else:
        show_offline(report)
    raise typer.Exit(1 if report.failed else 0)


@bench.command()
@with_flags
def serve(
    load: ServeLoad,
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    api_key: ApiKeyOption = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help='Count requests that are fast enough, in ms: "ttft:200 tpot:50 e2el:5000", or some of these.'
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Time limit of one request.")] = 600.0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Load on a server, and its latencies: any that speaks OpenAI's API.

    TTFT is the time to the first chunk with text, ITL the time between chunks, TPOT the time per token after the
    first, E2EL the time to the end. Tokens are those in the server's usage. The exit code is 1 if any request failed.

    Example: manta bench serve --request-rate 8 --num-prompts 200 --goodput "ttft:500 tpot:50"
    """
    from cluster.cli.bench.openai_client import OpenAIClient
    from cluster.cli.bench.progress import progress_bar
    from cluster.cli.bench.serve import measure, parse_goodput
    from cluster.cli.bench.tables import show_serve

    objectives = parse_goodput(goodput or "")
    with progress_bar() as progress:
        report = asyncio.run(measure(load, OpenAIClient(base_url, api_key, timeout_s), model, objectives, progress))
    if html is not None:
        from cluster.cli.bench.charts import write_serve_report

        write_serve_report(html, report)
    if as_json:
        print(json.dumps(report.flat(), allow_nan=False))
    else:
        show_serve(report)
    raise typer.Exit(1 if report.failed else 0)


@bench.command()
def determinism(
    model: ModelOption = "pocket",
    dtypes: Annotated[str, typer.Option(help="One or more of float32, bfloat16 and float16.")] = "bfloat16,float32",
    modes: Annotated[str, typer.Option(help="`off`, `strict`, or both.")] = "off,strict",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to compare with one.")] = "2",
    requests: Annotated[int, typer.Option(min=16, help="Number of requests.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    load_format: Annotated[str, typer.Option(help="`dummy` makes random weights of the model's shapes.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Count requests whose tokens, or log-probabilities, differ when they are not computed alone.

    In batches, in chunks, from a prefix cache, preempted, with drafted tokens, moved to another engine and on several
    ranks, without `determinism` and with `strict` (docs/determinism.md).

    Example: manta bench determinism --model DIR --dtypes bfloat16 --ranks "2 4"
    """
    from cluster.cli.bench.determinism import measure, show_report

    dtype_names, mode_names, sizes = (text.replace(",", " ").split() for text in (dtypes, modes, ranks))
    if unknown := [*{*mode_names} - {"off", "strict"}]:
        raise InvalidParameter("--modes", unknown[0], "off, strict, or both")
    if not all(size.isdecimal() and int(size) > 1 for size in sizes):
        raise InvalidParameter("--ranks", ranks, 'numbers above 1, as "2 4"')
    report = measure(
        model=model,
        dtypes=dtype_names,
        modes=mode_names,
        ranks=[int(size) for size in sizes],
        requests=requests,
        output_len=output_len,
        seed=seed,
        load_format=load_format,
        device=device,
        num_threads=threads,
    )
    if as_json:
        print(json.dumps(asdict(report), allow_nan=False))
    else:
        show_report(report)

"""Commands of `manta bench`. Each imports what it needs itself, so that `manta --help` is fast."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from cluster.cli.bench.load import OfflineLoad, ServeLoad
from cluster.cli.help import App
from cluster.flags import ApiKeyOption, EngineFlags, HtmlOption, JsonOption, ModelOption, with_flags

bench = App(help="Measure a server, or an engine alone.")


@bench.command()
@with_flags
def offline(
    load: OfflineLoad,
    engine: EngineFlags,
    model: ModelOption = "pocket",
    as_json: JsonOption = False,
) -> None:
    """Measure throughput and latency of the engine alone, in this process.

    Answers are greedy and have the full length. With --requests 1 the latencies are those of a single stream; with
    more, they include waiting for other requests.

    Example: manta bench offline --requests 1 --output-len 128
    """
    from cluster.cli.bench.offline import measure
    from cluster.cli.bench.tables import show_offline
    from cluster.terminal.progress import progress_bar

    load.check_flags()
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
    base_url: Annotated[str, typer.Option(help="Address of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name of the model. Default: the first of /v1/models.")] = None,
    api_key: ApiKeyOption = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Send the requests of a tape (`manta tape save`), or what `manta simulate --trace` takes: a file, at "
            "its times or at --request-rate, or a name, such as agents. Prompts are random, and begin alike where they "
            "did; turns of conversations wait for the answers before them.",
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help='Count the requests that keep all of these limits, in ms: "ttft:200 tpot:50 e2el:5000". '
            "Limits may be left out."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Time limit of one request.")] = 600.0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Send load to a server with OpenAI's API, and measure its latencies.

    TTFT is the time to the first chunk with text, ITL the time between chunks, TPOT the time per token after the
    first, E2EL the time to the end. Token counts come from the server's usage. Exit code 1 if any request failed.

    Example: manta bench serve --request-rate 8 --num-prompts 200 --goodput "ttft:500 tpot:50"

    Example: manta bench serve --trace monday.tape

    Example: manta bench serve --trace agents --scale 0.01 --request-rate 2 --num-prompts 400
    """
    from cluster.cli.bench.openai_client import OpenAIClient
    from cluster.cli.bench.serve import measure, parse_goodput
    from cluster.cli.bench.tables import show_serve
    from cluster.terminal.progress import progress_bar

    objectives = parse_goodput(goodput or "")
    if trace is None:
        load.check_flags()
    else:
        from cluster.cli.bench.trace_load import TraceLoad

        load = TraceLoad.of(trace, load)
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

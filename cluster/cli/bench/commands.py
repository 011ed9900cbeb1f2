"""`manta bench`: the commands. Each imports what it needs by itself: torch takes seconds, `manta --help` should not."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cluster.cli.bench.progress import progress_bar

bench = typer.Typer(no_args_is_help=True, help="Measure, beside the figure that the result has to be compared to.")

ENGINE = "Engine"
LOAD = "Load"
ModelOption = Annotated[str, typer.Option(help="`pocket` (bundled), a Hugging Face model folder, or a Hub id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")]
SeedOption = Annotated[int, typer.Option(help="Of the random prompts.")]
DtypeOption = Annotated[str, typer.Option(rich_help_panel=ENGINE, help="auto, float32, bfloat16 or float16.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="CPU threads; default: one per core.")
]
BudgetOption = Annotated[int, typer.Option(min=1, rich_help_panel=ENGINE, help="Tokens that one step may compute.")]
BlockSizeOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="Tokens per KV block. Default: what the device likes.")
]


@bench.command()
def offline(
    model: ModelOption = "pocket",
    workload: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LOAD,
            help="A preset with token ids that other engines can be given too, in place of the four options below. "
            "W1: 64 x 128 in, 64 out (Qwen3: 16 x 256 in, 64 out). W2: one stream, 128 in, 128 out. The model needs a "
            "vocabulary of 31,000.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Handed over all at once.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Tokens per prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Tokens per answer.")] = 64,
    seed: SeedOption = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="Each with new prompts.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Repetitions before those that count.")] = 1,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    max_num_batched_tokens: BudgetOption = 2048,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, rich_help_panel=ENGINE, help="Sequences that run at a time.")
    ] = 128,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, rich_help_panel=ENGINE, help="Longest prompt + answer, in tokens.")
    ] = None,
    block_size: BlockSizeOption = None,
    kv_cache_memory_gib: Annotated[
        float | None, typer.Option(rich_help_panel=ENGINE, help="Size of the KV cache.")
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(rich_help_panel=ENGINE, help="Reuse the KV of equal prefixes.")
    ] = True,
    overlap: Annotated[
        bool | None, typer.Option(rich_help_panel=ENGINE, help="Plan a step while the one before computes.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, rich_help_panel=ENGINE, help="Ranks that share the model.")
    ] = 1,
    torch_compile: Annotated[
        bool, typer.Option(rich_help_panel=ENGINE, help="Compile what stands between attentions.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Throughput and latency of the engine alone, in this process.

    Greedy, and always to the full length. With --requests 1 the two latencies are those of a single stream; with more,
    requests wait for one another.

    Example: manta bench offline --requests 1 --output-len 128
    """
    from cluster.cli.bench.offline import measure
    from cluster.cli.bench.tables import show_offline

    with progress_bar() as progress:
        report = measure(
            model=model, workload=workload, requests=requests, input_len=input_len, output_len=output_len,
            repetitions=repetitions, warmup=warmup, seed=seed, progress=progress,
            dtype=dtype, num_threads=threads, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size,
            kv_cache_memory_gib=kv_cache_memory_gib, enable_prefix_caching=prefix_caching, overlap=overlap,
            tensor_parallel=tensor_parallel, torch_compile=torch_compile,
        )  # fmt: skip
    if as_json:
        print_json(asdict(report))
    else:
        show_offline(report)
    raise typer.Exit(1 if report.failed else 0)


@bench.command()
def serve(
    base_url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    num_prompts: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Requests to send.")] = 100,
    request_rate: Annotated[
        float, typer.Option(rich_help_panel=LOAD, help="Requests per second; inf sends all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            rich_help_panel=LOAD, help="Of the arrivals: 1 is a Poisson process, below 1 in bursts, above 1 evenly."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=LOAD, help="Requests on their way at a time; the others wait, unmeasured."),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Tokens of each prompt's own.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Tokens per answer.")] = 64,
    prefix_len: Annotated[int, typer.Option(min=0, rich_help_panel=LOAD, help="Tokens before these, shared.")] = 0,
    prefix_groups: Annotated[
        int, typer.Option(min=1, rich_help_panel=LOAD, help="Number of different prefixes; prompts take turns.")
    ] = 1,
    text: Annotated[
        bool, typer.Option("--text", rich_help_panel=LOAD, help="Send English words, not token ids; chat always does.")
    ] = False,
    vocab_size: Annotated[
        int, typer.Option(min=2, rich_help_panel=LOAD, help="Token ids are below this; the model must have them.")
    ] = 1000,
    temperature: Annotated[float, typer.Option(min=0, rich_help_panel=LOAD, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(rich_help_panel=LOAD, help="Ask for the full length; a server may not know the field.")
    ] = True,
    num_warmups: Annotated[int, typer.Option(min=0, rich_help_panel=LOAD, help="Requests sent before the clock.")] = 0,
    seed: SeedOption = 0,
    goodput: Annotated[
        str | None,
        typer.Option(
            help='Count requests that are fast enough, in ms: "ttft:200 tpot:50 e2el:5000", or some of these.'
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="For one request.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Load on a server, and its latencies: any that speaks OpenAI's API.

    TTFT is the time to the first chunk with text, ITL the time between chunks, TPOT the time per token after the
    first, E2EL the time to the end. Tokens are those in the server's usage. The exit code is 1 if any request failed.

    Example: manta bench serve --request-rate 8 --num-prompts 200 --goodput "ttft:500 tpot:50"
    """
    from cluster.cli.bench.serve import Load, measure
    from cluster.cli.bench.tables import show_serve

    load = Load(
        endpoint=endpoint, num_prompts=num_prompts, request_rate=request_rate, burstiness=burstiness,
        max_concurrency=max_concurrency, input_len=input_len, output_len=output_len, prefix_len=prefix_len,
        prefix_groups=prefix_groups, text=text, vocab_size=vocab_size, temperature=temperature,
        ignore_eos=ignore_eos, num_warmups=num_warmups, seed=seed,
    )  # fmt: skip
    with progress_bar() as progress:
        report = measure(
            load,
            base_url=base_url,
            model=model,
            api_key=api_key,
            timeout_s=timeout_s,
            goodput=goodput,
            progress=progress,
        )
    if as_json:
        print_json(report.flat())
    else:
        show_serve(report)
    raise typer.Exit(1 if report.failed else 0)


def print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields, allow_nan=False))

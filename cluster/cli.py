"""The command `manta`."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from engine.errors import ServingError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Manta: serve and run large language models.")
bench = typer.Typer(no_args_is_help=True, help="Measure, beside the figure that the result has to be compared to.")
app.add_typer(bench, name="bench")

ModelOption = Annotated[str, typer.Option(help="`pocket` (bundled), a Hugging Face model folder, or a Hub id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for programs.")]


@app.callback()
def configure(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


@app.command()
def generate(
    input: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines; see below.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="Answers; what is in it already is kept.")],
    model: ModelOption = "pocket",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; default: what the context holds.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to sample from; default 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="For lines that bring none.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + answer, in tokens.")] = None,
    kv_cache_memory_gib: Annotated[float | None, typer.Option(help="Size of the KV cache.")] = None,
) -> None:
    """Answer a file of prompts, offline; run it again after a kill, and it goes on where it was.

    A line of the input is a JSON object with a "prompt" (text, or a list of token ids) or with "messages" as in the
    chat API; beside it an "id" of your choice and any sampling parameter. Line k of the output answers line k of the
    input.

    Example of a line: {"messages": [{"role": "user", "content": "What is an ocean?"}], "temperature": 0}
    """
    from cluster.batch_inference import generate_file  # torch takes seconds; `manta --help` should not
    from engine.llm import LLM

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    defaults = {name: value for name, value in given.items() if value is not None}
    options: dict[str, Any] = {
        "dtype": dtype, "max_model_len": max_model_len, "kv_cache_memory_gib": kv_cache_memory_gib
    }  # fmt: skip
    summary = generate_file(lambda: LLM(model, **options), input, output, defaults, progress=sys.stderr.isatty())
    told = f"{summary.written} lines answered, {summary.failed} of them with an error"
    print(f"{told}; {summary.resumed} were there before" if summary.resumed else told, file=sys.stderr)
    raise typer.Exit(1 if summary.failed else 0)


@bench.command()
def memory(
    requests: Annotated[int, typer.Option(min=1, help="How many requests to run.")] = 1000,
    mean_prompt: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 1155,
    mean_output: Annotated[float, typer.Option(min=1, help="Tokens; log-normal.")] = 211,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    max_model_len: Annotated[int, typer.Option(min=2, help="The context; what reserving would reserve.")] = 4096,
    as_json: JsonOption = False,
) -> None:
    """KV memory that holds no token: paging against reserving the longest possible sequence."""
    from cluster.bench.memory import measure

    report = measure(
        requests=requests, mean_prompt=mean_prompt, mean_output=mean_output, block_size=block_size,
        max_model_len=max_model_len, progress=sys.stderr.isatty(),
    )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(report)))
        return
    table = Table("", "allocated but empty", title=f"{requests} requests, {report.mean_prompt:.0f} tokens in and "
                  f"{report.mean_output:.0f} out on average, {report.mean_running:.0f} running at a time")  # fmt: skip
    table.add_row(f"paged, blocks of {block_size}", f"{report.paged_waste:.1%}")
    table.add_row(f"reserving the maximum ({max_model_len})", f"{report.reserved_waste:.1%}")
    table.add_row("claimed by Kwon et al. 2023", "< 4 % and 60 to 80 %")
    Console().print(table)


def main() -> None:
    """Exit code 1 and one line for an error that the user can mend."""
    try:
        app()
    except ServingError as error:
        print(f"manta: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

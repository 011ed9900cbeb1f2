"""What a form of the weights gives on this machine: each is measured by `manta bench offline`, in turns.

All start from the numbers of a GGUF file: the file as it is, and bfloat16, int8 and int4 made of it. What each does to
texts is measured by `python -m benchmarks.real_model perplexity`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.terminal.tables import figure, make_table, show
from engine.model.checkpoint.resolve import resolve
from tools.gguf_numbers import write_numbers

STREAMS = (1, 16)
INPUT_LEN, OUTPUT_LEN = 128, 64


@dataclass(frozen=True, slots=True)
class FormReport:
    form: str
    tokens_per_s: list[float]  #: that come out, for STREAMS at a time; medians, as all below
    first_token_ms: float  #: of one stream
    memory_gib: float  #: the largest resident set of the process with one stream


@dataclass(frozen=True, slots=True)
class FormsReport:
    model: str
    rounds: int
    forms: list[FormReport]


def measure(model: str, rounds: int) -> FormsReport:
    with tempfile.TemporaryDirectory() as folder:
        write_numbers(resolve(model), Path(folder), torch.bfloat16)
        forms = {
            "bfloat16": (folder,),
            "GGUF, kept packed": (model,),
            "int8": (folder, "--quantization", "int8"),
            "int4": (folder, "--quantization", "int4"),
        }
        found: dict[str, list[list[dict[str, Any]]]] = {form: [] for form in forms}
        for _ in range(rounds):
            for form, options in forms.items():
                found[form].append([bench(*options, requests=requests) for requests in STREAMS])
    return FormsReport(model, rounds, [summary(form, reports) for form, reports in found.items()])


def bench(model: str, *options: str, requests: int) -> dict[str, Any]:
    load = ["--requests", str(requests), "--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN)]
    command = [sys.executable, "-m", "cluster.cli.main", "bench", "offline", "--model", model, *options, *load]
    printed = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(printed.stdout.splitlines()[-1])
    return found


def summary(form: str, rounds: list[list[dict[str, Any]]]) -> FormReport:
    tokens = [
        median(report["output_tokens_per_s"]["median"] for report in reports) for reports in zip(*rounds, strict=True)
    ]
    alone = [reports[0] for reports in rounds]
    first_token_ms = median(report["ttft_ms"]["median"] for report in alone)
    return FormReport(form, tokens, first_token_ms, median(report["peak_rss_gib"] for report in alone))


def show_report(report: FormsReport) -> None:
    streams = (f"tokens/s, {number} stream{'s' * (number > 1)}" for number in STREAMS)
    table = make_table("weights", *streams, "ms to the first token", "GiB of memory")
    for form in report.forms:
        rates = (figure(rate, 0) for rate in form.tokens_per_s)
        table.add_row(form.form, *rates, figure(form.first_token_ms, 0), figure(form.memory_gib, 2))
    title = f"{report.model}: prompts of {INPUT_LEN} tokens, answers of {OUTPUT_LEN}; medians of {report.rounds} rounds"
    show(title, table)


def main(
    model: Annotated[str, typer.Option(help="A GGUF file, or what `manta pull` fetched.")] = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="How often each form takes its turn.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second, first token and memory of a model in bfloat16, as its GGUF file has it, in int8 and int4."""
    print_report(measure(model, rounds), as_json, show_report)


if __name__ == "__main__":
    run(main)

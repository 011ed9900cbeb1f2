"""The engine beside vLLM's CPU backend, OpenVINO GenAI and llama.cpp: the same weights, token ids and threads.

Each engine has a process of its own, with the Python of the environment it is installed in. They run every load in
turn, round by round, so that what else the machine does hits all alike. Ratios are of medians, to the better peer.
Loads over HTTP go to `manta serve` and `vllm serve` as they are by default, whatever the number of threads.

How to make the environments stands in docs/measurements/performance.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import psutil
import typer

from benchmarks.command import JsonOption, print_report, run
from benchmarks.peer_engines import OPTIONS
from benchmarks.peer_servers import manta_server, stop, vllm_server
from cluster.terminal.tables import figure, make_table, show

WARM_UP = 1000  # number of the repetition that is not counted


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive all at once. A length is drawn from (shortest, longest)."""

    name: str
    requests: int
    input: tuple[int, int]
    output: tuple[int, int]
    figure: str = "output"  #: tokens/s that count: output, or prompt
    prefixes: int = 1  #: different beginnings, which neighbours share
    prefix: int = 0  #: tokens of each
    turns: int = 1  #: of a chat: each prompt is the one before, its answer, and new tokens
    sampled: bool = False
    stream: bool = False  #: one request, whose tokens are timed
    http: bool = False  #: to servers, which have as many requests under way all the time

    @property
    def figures(self) -> tuple[str, ...]:
        if self.stream:
            return ("first", "each")
        return ("output", "p99") if self.http else (self.figure,)


LOADS = (
    Load("64 equal requests", 64, (128, 128), (64, 64)),
    Load("16 equal requests", 16, (128, 128), (64, 64)),
    Load("mixed lengths, sampled", 48, (16, 1024), (16, 256), sampled=True),
    Load("long prompts", 8, (500, 4000), (8, 8), figure="prompt"),
    Load("shared prefixes", 48, (32, 32), (32, 32), prefixes=4, prefix=1024),
    Load("short chats", 16, (16, 64), (16, 64), turns=4, sampled=True),
    Load("one stream", 1, (128, 128), (128, 128), stream=True),
    Load("one prompt", 1, (1024, 1024), (1, 1), figure="prompt"),
    Load("16 of 2 prefixes", 16, (32, 32), (32, 32), prefixes=2, prefix=512),
    Load("HTTP, 16 streams", 16, (128, 128), (64, 64), http=True),
    Load("HTTP, 64 streams", 64, (128, 128), (64, 64), http=True),
)
FIGURES = {
    "output": "output tokens/s", "prompt": "prompt tokens/s",
    "start": "s to start", "memory": "MiB in the end",
    "first": "ms to the first", "each": "ms per token", "p99": "ms between tokens, P99",
}  # fmt: skip
PROCESS = "the process"
SETTLE_S = 0.5
"""Pause before each measurement. The threads of the engine before spin for a while (Intel's OpenMP for 0.2 s), which
would take a core from the next one's first token."""
LESS_IS_BETTER = ("first", "each", "p99", "start", "memory")


@dataclass(frozen=True, slots=True)
class Row:
    load: str
    figure: str
    engines: dict[str, list[float]]  #: of each repetition
    ratio: float | None  #: of the engine's median to the better peer's

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.engines.items()}

    @classmethod
    def of(cls, load: str, figure: str, engines: dict[str, list[float]]) -> Row:
        medians = {name: statistics.median(values) for name, values in engines.items()}
        own = medians.pop("manta")
        best = min if figure in LESS_IS_BETTER else max
        return cls(load, FIGURES[figure], engines, own / best(medians.values()) if medians else None)


@dataclass(frozen=True, slots=True)
class PeersReport:
    model: str
    threads: int
    repetitions: int
    rows: list[Row]


class Contender(Protocol):
    name: str

    def measure(self, load: Load, repetition: int) -> dict[str, float]: ...


def preloaded(python: str) -> dict[str, str]:
    """Return the environment with Intel's OpenMP where it is installed, which vLLM's documentation recommends."""
    openmp = next(Path(python).absolute().parents[1].glob("lib/libiomp5.so"), None)
    return {} if openmp is None else {"LD_PRELOAD": str(openmp)}


class Worker:
    """The process of an engine."""

    def __init__(self, name: str, python: str, model: str, threads: int):
        environment = os.environ | preloaded(python)
        command = [python, "-m", "benchmarks.peer_engines", name, model, str(threads)]
        self.name = name
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()
        self.start_s = time.perf_counter() - started

    def memory_mib(self) -> float:
        """Return the memory of the process and its children; a page that several share counts as a part of one."""
        process = psutil.Process(self._process.pid)
        return sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True))) / 2**20

    def measure(self, load: Load, repetition: int) -> dict[str, float]:
        assert self._process.stdin
        time.sleep(SETTLE_S)
        print(json.dumps({"load": asdict(load), "repetition": repetition}), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        stop(self._process)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"{self.name} has ended; its own error stands above")


def compare(loads: Sequence[Load], workers: Sequence[Contender], repetitions: int) -> list[Row]:
    rows = []
    for load in loads:
        found: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for repetition in (WARM_UP, *range(repetitions)):
            for worker in workers:
                measured = worker.measure(load, repetition)
                print(
                    f"{load.name}, {worker.name}: {measured}", file=sys.stderr
                )  # so that a run that is cut off has them
                if repetition != WARM_UP:
                    found[worker.name].append(measured)
        for key in load.figures:
            row = Row.of(load.name, key, {name: [run[key] for run in runs] for name, runs in found.items()})
            rows.append(row)
            print(f"{load.name}: {row.medians} {row.figure}", file=sys.stderr)
    return rows


def show_report(report: PeersReport) -> None:
    names = list(report.rows[0].engines)
    table = make_table("load", "", *names, "to the better peer")
    for row in report.rows:
        medians = [figure(median, 1) for median in row.medians.values()]
        table.add_row(row.load, row.figure, *medians, "" if row.ratio is None else f"{row.ratio:.2f}")
    show(f"{report.model}, {report.threads} threads, medians of {report.repetitions}", table)


def main(
    model: Annotated[
        str,
        typer.Option(help="Folder of the model; beside it OpenVINO's version, ov-NAME, and llama.cpp's, NAME.gguf."),
    ],
    vllm: Annotated[str | None, typer.Option(help="Python of the environment with vLLM.")] = None,
    openvino: Annotated[str | None, typer.Option(help="Python of the environment with OpenVINO GenAI.")] = None,
    llamacpp: Annotated[str | None, typer.Option(help="Python of the environment with xllamacpp.")] = None,
    quantization: Annotated[str | None, typer.Option(help="What Manta rounds the weights to: int8, int4.")] = None,
    loads: Annotated[str, typer.Option(help="Parts of the names of loads, with commas; default: all.")] = "",
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each load, after one that warms up.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each engine.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine beside its peers on a CPU.

    Example: python -m benchmarks.peers --model DIR/llama-160m --vllm ~/vllm/bin/python --openvino ~/ov/bin/python
    """
    pythons = {"manta": sys.executable, "vllm": vllm, "openvino": openvino, "llamacpp": llamacpp}
    if quantization:
        os.environ[OPTIONS] = json.dumps({"quantization": quantization})
    chosen = [load for load in LOADS if any(part.strip() in load.name for part in loads.split(","))]
    if not chosen:
        raise typer.BadParameter(f"none of {', '.join(load.name for load in LOADS)}", param_hint="--loads")
    rows = []
    with ExitStack() as running:
        if offline := [load for load in chosen if not load.http]:
            workers = [Worker(name, python, model, threads) for name, python in pythons.items() if python]
            for worker in workers:
                running.callback(worker.close)
            rows += compare(offline, workers, repetitions)
            rows += [
                Row.of(PROCESS, "start", {worker.name: [worker.start_s] for worker in workers}),
                Row.of(PROCESS, "memory", {worker.name: [worker.memory_mib()] for worker in workers}),
            ]
        if online := [load for load in chosen if load.http]:
            servers: list[Contender] = [manta_server(model)]
            if vllm:
                servers.append(vllm_server(model, vllm, preloaded(vllm)))
            rows += compare(online, servers, repetitions)
    print_report(PeersReport(Path(model).name, threads, repetitions, rows), as_json, show_report)


if __name__ == "__main__":
    run(main)

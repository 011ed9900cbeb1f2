"""Seconds from `manta serve` to the first answer, phase by phase: `python -m benchmarks.startup`.

Each start has a copy of the working tree, compiled as `make install` does, an empty home, and a Ray of its own. A
client asks for one token again and again until it is answered. CPU seconds are of all processes together: on a machine
that is busy they tell more than the time that passed. Nothing else should run beside it.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.terminal.tables import make_table, show
from engine.model.checkpoint import smollm2
from tests.serve.serve_run import ServeRun

ROOT = Path(__file__).parent.parent
PHASES = {  # by the line of the log that ends each, in the order of most starts; the last three go on side by side
    "Ray is up": "Ray is up",
    "Serve's controller is up": "Serve is up",
    "HAProxy is up": "proxies are up",
    "the application is built, its ingress is up": "ingress ready",
    "the engine's process is up": "rank starts",
    "the engine is up": "ranks ready",
}
ANSWERED = "the first answer"
INSTALLED = ("compileall -q manta engine placement deployments cluster", "engine.model.ops.cpu")  # by `make install`
REQUEST = {"model": "default", "messages": [{"role": "user", "content": "What is a cache?"}], "max_tokens": 1}
LIMIT_S = 300.0


@dataclass
class Startup:
    """One start."""

    seconds: dict[str, float]  # by phase, since the process was started
    cpu_seconds: float
    refused: int  # requests that got an answer of another status before


@dataclass
class Startups:
    starts: list[Startup]


def copy_tree(to: Path) -> None:
    """Copy what git tracks, or would, as a clone has it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU time of processes, and of those that they have waited for."""
    total = 0.0
    for process in processes:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(folder: Path, model: str, compiled: bool) -> Startup:
    """Start a server, and end it at its first answer. compiled: ahead of the start, as `make install` does."""
    clone, home = folder / "clone", folder / "home"
    copy_tree(clone)
    fetched = home / smollm2.path().relative_to(Path.home())
    fetched.parent.mkdir(parents=True)
    if smollm2.path().is_file():
        fetched.symlink_to(smollm2.path())
    environment = {"PYTHONPATH": str(clone), "HOME": str(home)}
    for module in INSTALLED if compiled else ():
        subprocess.run([sys.executable, "-m", *module.split()], cwd=clone, env=environment, check=True)
    started, found = time.monotonic(), dict[str, float]()
    args = {"models": [{"name": "default", "model": model}]}
    run = ServeRun(folder, args, environment=environment, manta=True)
    with run as server, ThreadPoolExecutor(1) as client:
        answer = client.submit(ask_until_answered, server.url)
        while not answer.done():
            for name, line in PHASES.items():
                if name not in found and any(line in logged for logged in list(server.log)):
                    found[name] = time.monotonic() - started
            time.sleep(0.02)
        found[ANSWERED] = time.monotonic() - started
        return Startup(found, cpu_seconds(server.processes()), answer.result())


def ask_until_answered(url: str) -> int:
    """Return how many requests were refused before one was answered. Raises TimeoutError."""
    deadline, refused = time.monotonic() + LIMIT_S, 0
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if client.post("/v1/chat/completions", json=REQUEST).status_code == 200:
                    return refused
                refused += 1
            time.sleep(0.05)
    raise TimeoutError(f"no answer within {LIMIT_S:.0f} s")


def show_startups(report: Startups) -> None:
    table = make_table("since the process was started", "s, median", "from", "to")
    for name in [*PHASES, ANSWERED]:
        times = [start.seconds.get(name, math.nan) for start in report.starts]  # an answer may be quicker than the log
        table.add_row(name, *(f"{s:.1f}" for s in (statistics.median(times), min(times), max(times))))
    used = [start.cpu_seconds for start in report.starts]
    table.add_row("CPU time of all processes", *(f"{s:.1f}" for s in (statistics.median(used), min(used), max(used))))
    show(table)


def main(
    model: Annotated[str, typer.Option(help="As for `manta serve`.")] = smollm2.DEFAULT,
    repeats: Annotated[int, typer.Option(min=1, help="Starts.")] = 5,
    compiled: Annotated[bool, typer.Option(help="Compile Python and kernels before, as `make install` does.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure how long `manta serve` takes to its first answer."""
    starts = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="startup", dir="/tmp") as folder:
            starts.append(measure(Path(folder), model, compiled))
    print_report(Startups(starts), as_json, show_startups)


if __name__ == "__main__":
    run(main)

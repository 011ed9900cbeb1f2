"""The cost of a streamed token on its way through HTTP, in CPU time of the servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import aiohttp
import psutil
import typer
import yaml
from rich.progress import Progress

from benchmarks.command import JsonOption, print_report, run
from cluster import ray_environment
from cluster.terminal.progress import progress_bar
from cluster.terminal.tables import figure, make_table, show
from engine.errors import EngineUnavailable

T = TypeVar("T")
SERVERS = "benchmarks.http_servers"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
IDLE_S = 3.0  # for which a server is watched without a request
PATH_PROCESSES = re.compile(r"ray::(ServeReplica|Proxy)|haproxy")  # Ray's own daemons cost the same whatever is sent


@dataclass(frozen=True, slots=True)
class Stack:
    """The processes that a token passes between an engine and a client."""

    name: str
    application: str  #: in `http_servers`; the bare one runs without Serve
    environment: Mapping[str, str]


STACKS = [
    Stack("uvicorn alone", "bare", {}),
    Stack("Serve: proxy and streaming handle", "plain", {}),
    Stack("Manta behind Serve's proxy", "manta", {}),
    Stack("Manta behind HAProxy (make serve)", "manta", ray_environment.environment()),
]


@dataclass(frozen=True, slots=True)
class StackResult:
    name: str
    idle_ms_per_s: float  #: CPU time of the same processes while nobody asks: Ray's own threads, health checks
    us_per_token: list[float]  #: CPU time of all processes between engine and client, per repetition, without that

    @property
    def median(self) -> float:
        return statistics.median(self.us_per_token)


@dataclass(frozen=True, slots=True)
class HttpReport:
    streams: int
    tokens: int
    tick_s: float
    stacks: list[StackResult]


def measure(*, streams: int, tokens: int, repetitions: int, progress: Progress) -> HttpReport:
    """Run each server in turn; the first run against each does not count. Raises EngineUnavailable."""
    from benchmarks.http_servers import TICK_S

    stacks = [stack for stack in STACKS if sys.platform == "linux" or not stack.environment]
    bar = progress.add_task("http", total=len(stacks) * repetitions)
    results = []
    for stack in stacks:
        with _running(stack) as (server, url):
            costs = []
            asyncio.run(_load(url, streams, tokens))
            idle, _ = _spent(server, lambda: time.sleep(IDLE_S))
            for _ in range(repetitions):
                started = time.monotonic()
                spent, received = _spent(server, lambda: asyncio.run(_load(url, streams, tokens)))
                spent -= idle / IDLE_S * (time.monotonic() - started)
                costs.append(1e6 * spent / received)
                progress.advance(bar)
            results.append(StackResult(stack.name, 1e3 * idle / IDLE_S, costs))
    return HttpReport(streams, tokens, TICK_S, results)


@contextmanager
def _running(stack: Stack) -> Iterator[tuple[psutil.Process, str]]:
    """Start a server; yield its first process, and its URL."""
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # Ray's socket paths must be short
        port = _free_port()
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", **stack.environment}
        if stack.environment:
            environment |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(_free_port()) for name in ("METRICS", "STATS")}
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                _command(stack, port, folder), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                asyncio.run(_wait_until_up(f"http://127.0.0.1:{port}/health", process, log.name))
                yield psutil.Process(process.pid), f"http://127.0.0.1:{port}/v1/completions"
            finally:
                _stop(process)


def _command(stack: Stack, port: int, folder: str) -> list[str]:
    if stack.application == "bare":
        options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        return [sys.executable, "-m", "uvicorn", f"{SERVERS}:bare", *options]
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": "http", "route_prefix": "/", "import_path": f"{SERVERS}:{stack.application}"}],
    }
    path = Path(folder, "serve_config.yaml")
    path.write_text(yaml.safe_dump(config))
    return [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(path)]


async def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineUnavailable(f"the server did not come up: {Path(log).read_text()[-2000:]}")
            await asyncio.sleep(0.2)


async def _load(url: str, streams: int, tokens: int) -> int:
    """Return the number of tokens received. Raises EngineUnavailable if any stream fell short."""
    body = {"model": "pocket", "prompt": [300], "max_tokens": tokens, "stream": True, "ignore_eos": True}

    async def receive(session: aiohttp.ClientSession) -> int:
        async with session.post(url, json=body) as answer:
            text = await answer.read()
            received = text.count(b"data: {")
            if received < tokens:
                raise EngineUnavailable(
                    f"a stream brought {received} of {tokens} tokens: {answer.status} {text[-200:]!r}"
                )
            return received

    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return sum(await asyncio.gather(*(receive(session) for _ in range(streams))))


def _spent(server: psutil.Process, action: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU time of the server during an action, and its result."""
    before = _cpu_seconds(server)
    result = action()
    return _cpu_seconds(server) - before, result


def _cpu_seconds(server: psutil.Process) -> float:
    """Sum the CPU time so far of the processes that a token passes through."""
    total = 0.0
    for process in [server, *server.children(recursive=True)]:
        try:
            name = " ".join(process.cmdline())
            if "uvicorn" in name or PATH_PROCESSES.search(name):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def _stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in psutil.wait_procs(children, timeout=1)[1]:
        child.kill()


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def show_report(report: HttpReport) -> None:
    table = make_table("", "µs of CPU per token", "against the first", "ms of CPU per s idle")
    for stack in report.stacks:
        table.add_row(
            stack.name,
            figure(stack.median),
            f"{stack.median / report.stacks[0].median:.2f}",
            figure(stack.idle_ms_per_s),
        )
    show(
        f"{report.streams} streams of {report.tokens} tokens, one every {1000 * report.tick_s:.0f} ms each; medians",
        table,
    )


def main(
    streams: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream.")] = 256,
    repetitions: Annotated[int, typer.Option(min=1, help="Against each server, after one that does not count.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure the cost of a streamed token on its way through HTTP, in CPU time of the servers: Manta's way, with a
    clock for an engine, against uvicorn alone and against Serve's proxy and a streaming handle.

    Starts each of these servers in turn, with a Ray of its own.

    Example: python -m benchmarks.http --streams 16 --tokens 128
    """
    with progress_bar() as progress:
        report = measure(streams=streams, tokens=tokens, repetitions=repetitions, progress=progress)
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)

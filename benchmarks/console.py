"""What ten viewers of the console cost a server while 64 streams run.

CPU seconds of its ingresses, replicas and proxy, in periods with viewers and without, in turns. These processes also
have more to do when more tokens come, so the cost is what is left beside the tokens: least squares over all periods.
The ranks are not counted: they tell how they are whether or not somebody looks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.command import run
from cluster.cli.bench.openai_client import OpenAIClient

PARTS = {"ingress": "manta:ingress", "replicas": "ray::ServeReplica:manta:", "proxy": "haproxy"}
SETTLE_S = 2.0  # before a period


def main(
    pid: Annotated[int, typer.Option(help="Process of `manta serve`.")],
    url: Annotated[str, typer.Option(help="Its address.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model that the streams ask.")] = "pocket",
    streams: Annotated[int, typer.Option(help="That run all the time.")] = 64,
    viewers: Annotated[int, typer.Option(help="Of the console.")] = 10,
    periods: Annotated[int, typer.Option(help="With viewers, and as many without.")] = 8,
    seconds: Annotated[float, typer.Option(help="Of each period.")] = 8.0,
) -> None:
    rows = asyncio.run(measure(pid, url, model, streams, viewers, periods, seconds))
    watched, tokens, cpu = (np.array(column) for column in zip(*rows, strict=True))
    factors = np.stack([np.ones_like(tokens), tokens, watched], axis=1)
    print(f"{streams} streams, {tokens.mean():.0f} tokens/s, {viewers} viewers, {2 * periods} periods of {seconds:g} s")
    print("| processes | % of a core without viewers | with viewers | viewers alone | standard error |")
    print("| --- | --- | --- | --- | --- |")
    for name, used in [*zip(PARTS, cpu.T, strict=True), ("all", cpu.sum(axis=1))]:
        solution = np.linalg.lstsq(factors, used, rcond=None)[0]
        error = used - factors @ solution
        variance = error @ error / (len(used) - 3) * np.linalg.inv(factors.T @ factors)[2, 2]
        figures = (used[watched == 0].mean(), used[watched == 1].mean(), solution[2], variance**0.5)
        print(f"| {name} | " + " | ".join(f"{100 * figure:.2f}" for figure in figures) + " |")


def find(pid: int) -> dict[str, list[psutil.Process]]:
    """Return the processes of a server, by what they are."""
    found: dict[str, list[psutil.Process]] = {name: [] for name in PARTS}
    for process in psutil.Process(pid).children(recursive=True):
        command = " ".join(process.cmdline())
        name = next((name for name, part in PARTS.items() if part in command), None)
        if name is not None:
            found[name].append(process)
    if not found["ingress"]:
        raise typer.BadParameter(f"process {pid} has no ingress below it", param_hint="--pid")
    return found


async def measure(
    pid: int, url: str, model: str, streams: int, viewers: int, periods: int, seconds: float
) -> list[tuple[int, float, list[float]]]:
    """Return (1 with viewers, tokens per second, parts of a core by kind of process) of each period.

    A period in which a process ends, as of a proxy that gets another configuration, is repeated.
    """
    rows: list[tuple[int, float, list[float]]] = []
    async with OpenAIClient(url, None, timeout_s=3600.0) as client, streaming(client, model, streams) as taken:
        while len(rows) < 2 * periods:
            watched = (len(rows) + 1) // 2 % 2  # 0 1 1 0: what changes slowly takes no side
            async with looking(client, viewers * watched):
                await asyncio.sleep(SETTLE_S)
                with suppress(psutil.NoSuchProcess):
                    processes = find(pid)
                    began, tokens, cpu = time.monotonic(), taken[0], cpu_seconds(processes)
                    await asyncio.sleep(seconds)
                    elapsed = time.monotonic() - began
                    used = [(b - a) / elapsed for a, b in zip(cpu, cpu_seconds(processes), strict=True)]
                    rows.append((watched, (taken[0] - tokens) / elapsed, used))
    return rows


def cpu_seconds(processes: dict[str, list[psutil.Process]]) -> list[float]:
    return [sum(sum(process.cpu_times()[:2]) for process in group) for group in processes.values()]


@asynccontextmanager
async def streaming(client: OpenAIClient, model: str, count: int) -> AsyncGenerator[list[int]]:
    """Keep so many streams running. Yields a list of one number: the chunks that have come."""
    taken = [0]

    async def stream(seed: int) -> None:
        body = {
            "model": model,
            "prompt": f"{seed}",
            "max_tokens": 500,
            "stream": True,
            "seed": seed,
            "ignore_eos": True,
        }
        while True:
            async with aclosing(client.chunks("/v1/completions", json.dumps(body).encode())) as chunks:
                async for _ in chunks:
                    taken[0] += 1

    async with running(stream(seed) for seed in range(count)):
        yield taken


@asynccontextmanager
async def looking(client: OpenAIClient, count: int) -> AsyncGenerator[None]:
    """Have so many viewers, who ask again when a stream ends, as the page does."""

    async def look() -> None:
        while True:
            async with aclosing(client.events("/console/state")) as events:
                async for _ in events:
                    pass

    async with running(look() for _ in range(count)):
        yield


@asynccontextmanager
async def running(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    run(main)

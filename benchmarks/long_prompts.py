"""The effect of huge prompts on the streams of a running server, and on its health checks."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import numpy as np
import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.flags import ApiKeyOption
from cluster.terminal.tables import figure, make_table, show
from engine.errors import EngineUnavailable

SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} sleeps on. "
HEALTH_INTERVAL_S = 0.05
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str
    path: str  #: of the long prompts; streams are completions
    streams: int
    prompts: int  #: sent at once
    megabytes: float  #: of each
    quiet_s: float  #: of streams alone, before


@dataclass(slots=True)
class Phase:
    """Times in milliseconds."""

    gaps_ms: list[float] = field(default_factory=list)  #: between chunks of a stream
    health_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    gap_max_ms: float
    gap_p99_ms: float
    health_max_ms: float
    health_median_ms: float

    @classmethod
    def of(cls, phase: Phase) -> Figures:
        gaps, health = np.array(phase.gaps_ms), np.array(phase.health_ms)
        return cls(*map(float, (gaps.max(), np.percentile(gaps, 99), health.max(), np.median(health))))


@dataclass(frozen=True, slots=True)
class LongPromptsReport:
    load: Load
    alone: Figures
    beside: Figures  #: while the long prompts are being refused or answered
    answers: dict[str, int]  #: to the long prompts: how many had which status
    answered_s: float  #: until the last of them


class Watch:
    """Clients that measure one phase after the other."""

    def __init__(self, client: OpenAIClient):
        self.phase = Phase()
        self.chunks: Counter[int] = Counter()  #: by stream
        self._client = client

    async def stream(self, number: int) -> None:
        """Receive streams until cancelled, one after the other. Raises StreamFailed."""
        body = {"prompt": SENTENCE.format(number), "max_tokens": 400, "ignore_eos": True, "stream": True}
        while True:
            last: float | None = None
            async with aclosing(self._client.chunks("/v1/completions", msgspec.json.encode(body))) as chunks:
                async for _ in chunks:
                    now = time.perf_counter()
                    if last is not None:
                        self.phase.gaps_ms.append(1000 * (now - last))
                    last = now
                    self.chunks[number] += 1

    async def health(self) -> None:
        while True:
            started = time.perf_counter()
            await self._client.get("/health")
            self.phase.health_ms.append(1000 * (time.perf_counter() - started))
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def until_all_streams_go_on(self, streams: int, watching: list[asyncio.Task[None]]) -> None:
        """Raises EngineUnavailable."""
        before = self.chunks.copy()
        async with asyncio.timeout(TIMEOUT_S):
            while any(self.chunks[number] == before[number] for number in range(streams)):
                await asyncio.sleep(0.01)
                for task in watching:
                    if task.done():
                        raise EngineUnavailable(f"a stream ended: {task.exception()}")


async def measure(load: Load, api_key: str | None) -> LongPromptsReport:
    """Raises EngineUnavailable."""
    text = "".join(map(SENTENCE.format, range(int(load.megabytes * 1e6) // len(SENTENCE) + 1)))
    body = msgspec.json.encode({"prompt": text[: int(load.megabytes * 1e6)]})
    async with OpenAIClient(load.url, api_key, TIMEOUT_S) as client:
        watch = Watch(client)
        watching = [asyncio.create_task(watch.stream(number)) for number in range(load.streams)]
        watching.append(asyncio.create_task(watch.health()))
        try:
            await watch.until_all_streams_go_on(load.streams, watching)
            alone = watch.phase = Phase()
            await asyncio.sleep(load.quiet_s)
            await watch.until_all_streams_go_on(load.streams, watching)
            beside = watch.phase = Phase()
            # from threads: a large body would keep the event loop, and with it the clocks, busy
            asked = (asyncio.to_thread(post, client.base_url, load.path, body, api_key) for _ in range(load.prompts))
            answers = await asyncio.gather(*asked)
            await watch.until_all_streams_go_on(load.streams, watching)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
    statuses = Counter(status for status, _ in answers)
    return LongPromptsReport(
        load, Figures.of(alone), Figures.of(beside), dict(statuses), max(took for _, took in answers)
    )


def post(url: str, path: str, body: bytes, api_key: str | None) -> tuple[str, float]:
    """Return the status, or what broke the connection, and the seconds until then."""
    address, started = urlsplit(url), time.perf_counter()
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        connection.request("POST", path, body, headers)
        with connection.getresponse() as response:
            response.read()
            return str(response.status), time.perf_counter() - started
    except OSError as error:
        return type(error).__name__, time.perf_counter() - started
    finally:
        connection.close()


def show_report(report: LongPromptsReport) -> None:
    load, table = report.load, make_table("ms", "streams alone", "beside the prompts")
    rows = [
        ("longest gap between chunks of a stream", "gap_max_ms"),
        ("P99 of the gaps", "gap_p99_ms"),
        ("slowest answer of /health", "health_max_ms"),
        ("median answer of /health", "health_median_ms"),
    ]
    for name, key in rows:
        table.add_row(name, *(figure(getattr(figures, key), 1) for figures in (report.alone, report.beside)))
    answers = ", ".join(f"{count} x {status}" for status, count in report.answers.items())
    show(
        f"{load.streams} streams, and {load.prompts} prompts of {load.megabytes:g} MB at once to {load.path}",
        table,
        f"the prompts were answered within {report.answered_s:.2f} s: {answers}",
    )


def main(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    path: Annotated[str, typer.Option(help="Route of the long prompts; /tokenize takes them without an engine.")] = (
        "/v1/completions"
    ),
    streams: Annotated[int, typer.Option(min=1, help="Streams that run all the time.")] = 16,
    prompts: Annotated[int, typer.Option(min=1, help="Long prompts, all at once.")] = 4,
    megabytes: Annotated[float, typer.Option(min=0.01, help="Size of each.")] = 10.0,
    quiet_s: Annotated[float, typer.Option(min=0.1, help="How long the streams run alone before.")] = 5.0,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what huge prompts do to the running streams of a server, and to its health checks.

    Works with any server of OpenAI's completions that has one model.

    Example: manta serve & python -m benchmarks.long_prompts --megabytes 2
    """
    load = Load(url=url, path=path, streams=streams, prompts=prompts, megabytes=megabytes, quiet_s=quiet_s)
    report = asyncio.run(measure(load, api_key))
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)

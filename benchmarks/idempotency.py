"""What an Idempotency-Key costs a request in each store, and each event of its stream.

Requests arrive at a fixed rate. Each goes through what the ingress does for a key: the record and the lease before
anything is computed, the tokens after the last of them. CPU times are those of this process, threads included.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from deployments.jobs.event_ids import EventIds
from deployments.jobs.job import Job
from deployments.jobs.record import JobRecord, job_id_of
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.key_value import KeyValueStore
from engine.text.text_stream import TextChunk
from engine.wire.token_delta import TokenDelta

NUM_EVENTS = 20_000


def main(
    redis: Annotated[str | None, typer.Option(help="URL of a Redis that may be written to.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 500.0,
    seconds: Annotated[float, typer.Option(help="Of each store.")] = 5.0,
    body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 2000,
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 200,
) -> None:
    print(f"event of a stream: {event_us():.2f} µs more than without an id")
    print(f"\n{rate:g} requests/s for {seconds:g} s, {body_bytes} bytes each, answers of {tokens} tokens")
    print("| store | CPU, µs per request | ms until a request is taken: median | 99th percentile | bytes per request |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=".") as folder:  # /tmp may be in memory
        urls = {"memory": None, "SQLite": f"sqlite://{Path(folder).absolute()}/store.db", "Redis": redis}
        for name, url in urls.items():
            if name != "Redis" or redis is not None:
                print(f"| {name} | {asyncio.run(measure(url, rate, seconds, body_bytes, tokens))} |")


def event_us() -> float:
    """Return the time to number one event of one token."""
    ids, chunk = EventIds("0" * 32, 1, None), TextChunk("a", [17], [0], None, None)
    started = time.process_time()
    for _ in range(NUM_EVENTS):
        for _ in ids.ordered(chunk):
            ids.next()
    return (time.process_time() - started) / NUM_EVENTS * 1e6


async def measure(url: str | None, rate: float, seconds: float, body_bytes: int, tokens: int) -> str:
    store = open_store(StoreConfig(url=url, max_bytes=2**30))
    body, taken, count = b"x" * body_bytes, list[float](), round(rate * seconds)
    started, cpu_started = time.perf_counter(), time.process_time()
    tasks = []
    for i in range(count):
        await asyncio.sleep(max(0.0, started + i / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(store, body, tokens, taken)))
    await asyncio.gather(*tasks)
    cpu_us = (time.process_time() - cpu_started) / count * 1e6
    record = JobRecord.new("", "/v1/completions", body, {"x-request-id": "0" * 32, "content-type": "application/json"})
    record.outputs = [TokenDelta(request_id="", token_ids=[30_000] * tokens, finish_reason="length")]
    await store.close()
    p99 = statistics.quantiles(taken, n=100)[-1]
    return f"{cpu_us:.0f} | {statistics.median(taken):.2f} | {p99:.1f} | {len(record.encode()):,}"


async def one(store: KeyValueStore, body: bytes, tokens: int, taken: list[float]) -> None:
    """One request. taken: gets the milliseconds until it is promised to be answered."""
    headers = {"x-request-id": "0" * 32, "content-type": "application/json"}
    record = JobRecord.new("", "/v1/completions", body, headers)
    job = Job(job_id_of("", record.secret), record, store, 60.0, lambda _: None, stored=False)
    started = time.perf_counter()
    await job._add("fp", None)
    taken.append((time.perf_counter() - started) * 1e3)
    for i in range(tokens):
        job._log.add((0, TokenDelta(request_id="", position=i, token_ids=[30_000])))
    await job._save()


if __name__ == "__main__":
    run(main)

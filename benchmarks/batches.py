"""What a running batch costs the requests of a server beside it.

Rounds without and with a batch alternate, so that what else the machine does hits both alike. In each, some clients
stream short answers, one after the other; ratios are of medians over all rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from typing import Annotated, Any

import httpx
import typer

from benchmarks.command import run

ENDPOINT = "/v1/completions"
Times = list[tuple[float, float]]
"""Seconds to the first token of each answer, and to its end."""


def main(
    url: Annotated[str, typer.Option(help="Of a server that is otherwise idle.")] = "http://127.0.0.1:8000",
    rounds: Annotated[int, typer.Option(help="Of each kind.")] = 5,
    seconds: Annotated[float, typer.Option(help="Of a round.")] = 12.0,
    clients: Annotated[int, typer.Option(help="That stream at a time.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Of their answers, and of the batch's.")] = 64,
) -> None:
    asyncio.run(measure(url, rounds, seconds, clients, max_tokens))


async def measure(url: str, rounds: int, seconds: float, clients: int, max_tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        alone: Times = []
        beside: Times = []
        answered = 0
        await ask_for(client, 2.0, clients, max_tokens)
        for _ in range(rounds):
            alone += await ask_for(client, seconds, clients, max_tokens)
            batch_id = await start_batch(client, max_tokens)
            beside += await ask_for(client, seconds, clients, max_tokens)
            answered += await end_batch(client, batch_id)
    print(f"{clients} clients, {max_tokens} tokens, {rounds} rounds of {seconds:g} s; ms, median (90th percentile)")
    print("| | alone | beside a batch | ratio of medians |")
    print("| --- | --- | --- | --- |")
    for i, name in enumerate(("time to first token", "latency")):
        a, b = ([1000 * times[i] for times in some] for some in (alone, beside))
        medians = statistics.median(a), statistics.median(b)
        p90 = [statistics.quantiles(some, n=10)[-1] for some in (a, b)]
        print(
            f"| {name} | {medians[0]:.0f} ({p90[0]:.0f}) | {medians[1]:.0f} ({p90[1]:.0f}) "
            f"| {medians[1] / medians[0]:.2f} |"
        )
    print(f"answers: {len(alone)} alone, {len(beside)} beside {answered} of the batches")


async def ask_for(client: httpx.AsyncClient, seconds: float, clients: int, max_tokens: int) -> Times:
    """Let clients ask one question after the other for so long."""
    times: Times = []
    end = time.monotonic() + seconds

    async def ask(name: int) -> None:
        for i in itertools.count():
            if time.monotonic() > end:
                return
            body = {**question(f"client {name} asks {i}", max_tokens), "stream": True, "user": f"client {name}"}
            started, first = time.monotonic(), None
            async with client.stream("POST", ENDPOINT, json=body) as response:
                async for line in response.aiter_lines():
                    if first is None and line:
                        first = time.monotonic() - started
            assert first is not None and response.status_code == 200
            times.append((first, time.monotonic() - started))

    await asyncio.gather(*map(ask, range(clients)))
    return times


def question(text: str, max_tokens: int) -> dict[str, Any]:
    prompt = f"{text}: what is the meaning of the word that is in the middle of this line?"
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


async def start_batch(client: httpx.AsyncClient, max_tokens: int) -> str:
    """Start a batch that does not end by itself, and wait until it runs."""
    lines = [
        {"custom_id": str(i), "method": "POST", "url": ENDPOINT, "body": question(f"line {i}", max_tokens)}
        for i in range(20_000)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    body = {"input_file_id": file.raise_for_status().json()["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_id: str = (await client.post("/v1/batches", json=body)).raise_for_status().json()["id"]
    while (await client.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["completed"] == 0:
        await asyncio.sleep(0.2)
    return batch_id


async def end_batch(client: httpx.AsyncClient, batch_id: str) -> int:
    """Return how many lines were answered."""
    await client.post(f"/v1/batches/{batch_id}/cancel")
    while (batch := (await client.get(f"/v1/batches/{batch_id}")).json())["status"] != "cancelled":
        await asyncio.sleep(0.2)
    for key in ("input_file_id", "output_file_id", "error_file_id"):
        await client.delete(f"/v1/files/{batch[key]}")
    return int(batch["request_counts"]["completed"])


if __name__ == "__main__":
    run(main)

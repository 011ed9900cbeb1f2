"""What others wait while one client's batches are made to cost a server as much as they can.

Both need a server with two API keys that is otherwise idle. `line`: a single line of a batch, which is one list of
empty objects, is checked while another client asks short questions. `turns`: one key has several large batches, and
the other a batch of a single line.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Annotated, Any

import httpx
import typer

from benchmarks.command import run

ENDPOINT = "/v1/completions"
QUIET_S = 5.0
PROBE_INTERVAL_S = 0.05


def main(
    attack: Annotated[str, typer.Argument(help="`line` or `turns`.")],
    url: Annotated[str, typer.Option(help="Of a server that is otherwise idle.")] = "http://127.0.0.1:8000",
    keys: Annotated[str, typer.Option(help="Two API keys of it, with a comma.")] = "one,other",
    mib: Annotated[int, typer.Option(help="Of the line.")] = 30,
    batches: Annotated[int, typer.Option(help="Of the first key, for `turns`.")] = 4,
    lines: Annotated[int, typer.Option(help="Of each of these.")] = 2000,
    limit_s: Annotated[float, typer.Option(help="After which no longer is waited.")] = 120.0,
) -> None:
    asyncio.run(check_line(url, keys, mib, limit_s) if attack == "line" else turns(url, keys, batches, lines, limit_s))


def clients(url: str, keys: str) -> list[httpx.AsyncClient]:
    return [
        httpx.AsyncClient(base_url=url, timeout=300, headers={"Authorization": f"Bearer {key}"})
        for key in keys.split(",")
    ]


async def check_line(url: str, keys: str, mib: int, limit_s: float) -> None:
    one, other = clients(url, keys)
    async with one, other:
        ended = asyncio.Event()
        quiet = asyncio.create_task(waits(other, ended))
        await asyncio.sleep(QUIET_S)
        ended.set()
        before = await quiet
        content = b'{"custom_id":[' + b"{}," * (mib * 2**20 // 3) + b"{}]}\n"
        file = await one.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        file_id = file.raise_for_status().json()["id"]
        ended = asyncio.Event()
        probing = asyncio.create_task(waits(other, ended))
        batch = await create(one, file_id)
        started = time.monotonic()
        while (status := (await one.get(f"/v1/batches/{batch}")).json()["status"]) == "validating":
            if time.monotonic() > started + limit_s:
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
        ended.set()
        beside = await probing
        await one.delete(f"/v1/files/{file_id}")
    print(f"a line of {mib} MiB: {status} after {time.monotonic() - started:.1f} s")
    print(f"longest wait of another client: {max(beside):.2f} s beside it, {max(before):.2f} s in {QUIET_S:g} s before")


async def waits(client: httpx.AsyncClient, ended: asyncio.Event) -> list[float]:
    """Ask for one token again and again. Returns the seconds of each answer."""
    found = []
    while not ended.is_set():
        started, answered = time.monotonic(), False
        while not answered:
            with suppress(httpx.TransportError):  # a server that stands still closes idle connections when it goes on
                answered = (await client.post(ENDPOINT, json={"prompt": "a", "max_tokens": 1})).is_success
        found.append(time.monotonic() - started)
        await asyncio.sleep(PROBE_INTERVAL_S)
    return found


async def turns(url: str, keys: str, batches: int, lines: int, limit_s: float) -> None:
    one, other = clients(url, keys)
    async with one, other:
        large = [await create(one, await upload(one, lines)) for _ in range(batches)]
        while not all([(await retrieve(one, batch))["request_counts"]["completed"] for batch in large]):
            await asyncio.sleep(0.2)
        started = time.monotonic()
        small = await create(other, await upload(other, 1))
        while (await retrieve(other, small))["status"] != "completed" and time.monotonic() < started + limit_s:
            await asyncio.sleep(PROBE_INTERVAL_S)
        took_s = time.monotonic() - started
        done = sum([(await retrieve(one, batch))["request_counts"]["completed"] for batch in large])
        for client, batch in [(one, batch) for batch in large] + [(other, small)]:
            await client.post(f"/v1/batches/{batch}/cancel")
    waited = f"{took_s:.1f} s" if took_s < limit_s else f"more than {limit_s:g} s"
    print(
        f"a batch of one line beside {batches} of {lines} of another key: {waited}; {done} lines of these had answers"
    )


async def upload(client: httpx.AsyncClient, lines: int) -> str:
    body = {"prompt": "what is an ocean", "max_tokens": 64, "ignore_eos": True}
    content = "\n".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": ENDPOINT, "body": body}) for i in range(lines)
    )
    file = await client.post("/v1/files", files={"file": ("in.jsonl", content.encode())}, data={"purpose": "batch"})
    return str(file.raise_for_status().json()["id"])


async def create(client: httpx.AsyncClient, file_id: str) -> str:
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=body)).raise_for_status().json()["id"])


async def retrieve(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    return dict((await client.get(f"/v1/batches/{batch_id}")).json())


if __name__ == "__main__":
    run(main)

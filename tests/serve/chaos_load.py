"""Many clients, each of which asks again as soon as it has its answer, while something is changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.serve.chaos_streams import LIMIT_S, Stream

CLIENTS = 12
STREAMED = 5  # every so manieth request is a stream


@dataclass(slots=True)
class Loaded:
    """answers: (number of the body, text) of each request that succeeded. change_s: what the change took."""

    answers: list[tuple[int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    change_s: float = 0.0

    def texts(self, number: int) -> set[str]:
        return {text for n, text in self.answers if n == number}


def run_load(
    url: str,
    bodies: list[dict[str, Any]],
    at_least: int,
    change: Callable[[], None],
    *,
    reconnect: bool = False,
    limit_s: float = LIMIT_S,
) -> Loaded:
    """Ask until `change`, called after a tenth of the requests, has returned, and at least so many have ended.

    reconnect: each request has a connection of its own. limit_s: of all.
    """
    return asyncio.run(asyncio.wait_for(_run_load(url, bodies, at_least, change, reconnect), limit_s))


async def carry_out(change: Callable[[], None], ended: asyncio.Event) -> float:
    """Carry out a change beside what runs, set `ended` even if it fails, and return the seconds that it took."""
    started = time.monotonic()
    try:
        await asyncio.to_thread(change)
    finally:
        ended.set()
    return time.monotonic() - started


async def _run_load(
    url: str, bodies: list[dict[str, Any]], at_least: int, change: Callable[[], None], reconnect: bool
) -> Loaded:
    found, begun, changed = Loaded(), asyncio.Event(), asyncio.Event()
    asked = 0

    async def one_client(client: httpx.AsyncClient) -> None:
        nonlocal asked
        while asked < at_least or not changed.is_set():
            number, asked = asked, asked + 1
            started = time.monotonic()
            await _ask(client, number, bodies[number % len(bodies)], number % len(bodies), found)
            found.slowest_s = max(found.slowest_s, time.monotonic() - started)
            if asked >= at_least // 10:
                begun.set()

    async def one_change() -> None:
        await begun.wait()
        found.change_s = await carry_out(change, changed)

    limits = httpx.Limits(max_keepalive_connections=0) if reconnect else httpx.Limits()
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        await asyncio.gather(one_change(), *(one_client(client) for _ in range(CLIENTS)))
    return found


async def _ask(client: httpx.AsyncClient, asked: int, body: dict[str, Any], number: int, found: Loaded) -> None:
    if asked % STREAMED == 0:
        stream = Stream(f"load-{asked}", body)
        await stream.run(client, lambda: None)
        if stream.problem is None:
            found.answers.append((number, stream.text))
        else:
            found.problems.append(stream.problem)
        return
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        found.problems.append(repr(error))
        return
    if response.status_code == 200:
        found.answers.append((number, response.json()["choices"][0]["text"]))
    else:
        found.problems.append(f"{response.status_code} {response.text}")

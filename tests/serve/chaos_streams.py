"""Clients of a server to which something happens: streams that run meanwhile, and short requests beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

RUNNING = 5  # events after which a stream counts as running
LIMIT_S = 480.0


@dataclass(slots=True)
class Stream:
    """What one client got. name: in logs. salt: for prefix caches. arrivals: of its events, on the monotonic clock."""

    name: str
    body: dict[str, Any]
    salt: str = ""
    text: str = ""
    finish_reason: str | None = None
    problem: str | None = None
    arrivals: list[float] = field(default_factory=list)

    async def run(self, client: httpx.AsyncClient, progress: Callable[[], None]) -> None:
        """progress: called after every event. Whatever goes wrong is in `problem`."""
        last = b""
        ask = {**self.body, "stream": True, "request_id": self.name, "cache_salt": self.salt}
        try:
            async with client.stream("POST", "/v1/completions", json=ask) as response:
                if response.status_code != 200:
                    self.problem = f"{response.status_code} {(await response.aread()).decode()}"
                    return
                async for line in _lines(response):
                    last = line
                    if line.startswith(b"data: {"):
                        self._take(msgspec.json.decode(line.removeprefix(b"data: ")))
                        progress()
        except httpx.HTTPError as error:
            self.problem = repr(error)
        if self.problem is None and (last != b"data: [DONE]" or self.finish_reason is None):
            self.problem = f"the stream just stopped, after {last!r}"

    def _take(self, event: dict[str, Any]) -> None:
        self.arrivals.append(time.monotonic())
        if "error" in event:
            self.problem = str(event["error"])
            return
        choice = event["choices"][0]
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def pause_s(self, since: float) -> float:
        """The longest time between two events, of those that end after `since`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


@dataclass(slots=True)
class Struck:
    """streams: as they ended. at: when it happened. running: how many streams had not ended then.
    asked: short requests that were answered meanwhile. slowest_s: of these. problems: of all."""

    streams: list[Stream]
    at: float = 0.0
    running: int = 0
    asked: int = 0
    slowest_s: float = 0.0
    short_problems: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [stream.problem for stream in self.streams if stream.problem] + self.short_problems

    @property
    def texts(self) -> list[str]:
        return [stream.text for stream in self.streams]

    @property
    def pauses_s(self) -> list[float]:
        return sorted(stream.pause_s(self.at) for stream in self.streams)


def run_streams(url: str, bodies: list[dict[str, Any]], strike: Callable[[], None] | None = None) -> Struck:
    """Run them at the same time. strike: called once all of them run; one client then asks short questions, one after
    the other, until the streams have ended."""
    return asyncio.run(asyncio.wait_for(_run_streams(url, bodies, strike), LIMIT_S))


async def _run_streams(url: str, bodies: list[dict[str, Any]], strike: Callable[[], None] | None) -> Struck:
    salt = str(time.monotonic_ns())  # so that no run finds in a cache what the one before it computed
    found = Struck([Stream(f"stream-{i}", body, salt) for i, body in enumerate(bodies)])
    running = asyncio.Event()

    def progress() -> None:
        if all(len(stream.arrivals) >= RUNNING or stream.problem for stream in found.streams):
            running.set()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        streams = [asyncio.create_task(stream.run(client, progress)) for stream in found.streams]
        if strike is not None:
            waiting = asyncio.create_task(running.wait())
            await asyncio.wait([waiting, asyncio.gather(*streams)], return_when=asyncio.FIRST_COMPLETED)
            found.at = time.monotonic()
            found.running = sum(not stream.done() for stream in streams)
            short = asyncio.create_task(_ask_meanwhile(client, found, streams))
            await asyncio.to_thread(strike)
            await short
        await asyncio.gather(*streams)
    return found


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Those that are not empty. httpx's own iterator costs more than the server does."""
    rest = b""
    async for chunk in response.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, lines):
            yield line


async def _ask_meanwhile(client: httpx.AsyncClient, found: Struck, streams: list[asyncio.Task[None]]) -> None:
    while not all(stream.done() for stream in streams):
        started = time.monotonic()
        body = {"prompt": f"Question {found.asked}:", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            found.short_problems.append(repr(error))
            continue
        if response.status_code != 200:
            found.short_problems.append(f"{response.status_code} {response.text}")
        found.asked += 1
        found.slowest_s = max(found.slowest_s, time.monotonic() - started)

"""How long an event loop takes for a turn, in which no other request of an ingress goes on."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

SOME_JSON = json.dumps([{"key": i, "text": "abc"} for i in range(20_000)])
QUIET_S = 0.0085  # that it takes to parse that on two cores of a virtual AMD EPYC without AVX-512, if they are idle
MANY_NUMBERS, QUIET_NUMBERS_S = json.dumps([12345] * 10**6), 0.06  # as many objects as a body may have, and their time


def slowness() -> float:
    """How many times as long as on that machine a thread takes here and now; at least 1. A core whose other half, or
    whose caches, others use takes longer also in CPU time, and so do the objects of a large body, for which a virtual
    machine must first get memory from its host."""
    gc.disable()
    started = time.thread_time()
    json.loads(SOME_JSON)
    read = time.thread_time()
    json.loads(MANY_NUMBERS)
    made = time.thread_time()
    gc.enable()
    return max(1.0, (read - started) / QUIET_S, (made - read) / QUIET_NUMBERS_S)


@dataclass(slots=True)
class LongestTurn:
    cpu_s: float = 0.0


@asynccontextmanager
async def longest_turn() -> AsyncGenerator[LongestTurn]:
    """All callbacks that were ready at once, in CPU time of their thread: other processes change the clock's, not this.
    Python's garbage collector waits meanwhile: what it walks through is mostly the test suite's."""
    longest, original = LongestTurn(), asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: asyncio.BaseEventLoop) -> None:
        started = time.thread_time()
        try:
            original(loop)
        finally:
            longest.cpu_s = max(longest.cpu_s, time.thread_time() - started)

    asyncio.BaseEventLoop._run_once = timed  # type: ignore[attr-defined]
    gc.disable()
    try:
        await asyncio.sleep(0)  # the present turn began before
        yield longest
        await asyncio.sleep(0)
    finally:
        gc.enable()
        asyncio.BaseEventLoop._run_once = original  # type: ignore[attr-defined]

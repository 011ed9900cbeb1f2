"""One call to a replica for many prompts, because on Ray Serve a call takes more CPU time than a short text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployments.replicas.pools import EngineClient
from engine.wire.generate_request import GenerateRequest


class SharedCall:
    """EngineClient for the requests of one Generation. The first attempts of all requests share a call; each later
    attempt has its own call.

    The call is made once all requests have arrived. It ends for all of them together, and is cancelled when all of them
    are cancelled.
    """

    def __init__(self, pool: EngineClient, num_requests: int):
        self._pool, self._num_missing = pool, num_requests
        self._requests: list[GenerateRequest] = []
        self._complete = asyncio.Event()
        self._num_open = 0
        self._call: asyncio.Task[None] | None = None

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        if not self._num_missing:
            await self._pool.generate(*requests, avoid=avoid)
            return
        self._requests += requests
        self._num_missing -= len(requests)
        if not self._num_missing:
            self._complete.set()
        if self._call is None:
            self._call = asyncio.create_task(self._generate())
        self._num_open += 1
        try:
            await asyncio.shield(self._call)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._call.cancel()

    async def _generate(self) -> None:
        await self._complete.wait()
        await self._pool.generate(*self._requests)

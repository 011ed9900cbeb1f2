"""The time in which an ingress tries one suspect."""

from __future__ import annotations

import asyncio

from engine.wire.generate_request import TRIAL_S


class Trial:
    """Begins when no other one holds the lock, and ends with `end`."""

    def __init__(self, lock: asyncio.Lock):
        self._lock, self._holds = lock, False

    async def begin(self) -> None:
        try:
            async with asyncio.timeout(TRIAL_S):
                await self._lock.acquire()
                self._holds = True
        except TimeoutError:
            pass  # the one that is tried takes long

    def end(self) -> None:
        if self._holds:
            self._holds = False
            self._lock.release()

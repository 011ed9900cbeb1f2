"""The time in which an ingress tries one suspect."""

from __future__ import annotations

import asyncio

TRIAL_S = 30.0  # after which the next suspect does not wait any longer for the one that is tried


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

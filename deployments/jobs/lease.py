"""Lease of a job: says which ingress computes it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from deployments.storage.key_value import KeyValueStore, StoreUnavailable

LEASE_S = 10.0
"""Seconds after which a silent ingress loses a job."""
RENEW_S = LEASE_S / 4
REVOKED = b"revoked"
"""Holder of a lease that was seized: nobody computes the job any more."""
RETRY_S = 1.0
"""Seconds until a lease is renewed after the store has failed; shorter than the store takes to settle."""


async def _unfinished() -> bool:
    return True


def _ignore() -> None: ...


class Lease:
    """One holder's claim on a job. It expires when its ingress is silent, and other holders can seize it.

    All methods except `kept` raise StoreUnavailable.
    """

    def __init__(self, store: KeyValueStore, job_id: str, restore: Callable[[], Awaitable[bool]] = _unfinished):
        """restore: called if nobody has the lease any more, because it has expired or was lost with the store's values.
        Stores the job again unless it is stored, and returns whether it is still to be done."""
        self._store, self._key, self._restore = store, lease_key(job_id), restore
        self._holder = secrets.token_hex(16).encode()

    async def take(self, server: str) -> bool:
        """Take the job unless another holder has it. Returns whether this holder has it now.

        server: what the store's `settled` returned before. If another server got the command, a holder may not have
        had the time to store its lease there, so this one gives it back.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        if not await self._store.add(self._key, self._holder, LEASE_S):
            return False
        if await self._store.settled() != server:
            await self.release()
            return False
        # a process that stood still may have lost the lease before it was told that it had it
        return loop.time() < asked_at + LEASE_S or await self.holds()

    async def renew(self) -> bool:
        """Hold the job for another LEASE_S. Returns False if another holder has it, or has done it."""
        if await self.holds():
            return True
        if await self.is_held() or not await self._restore():
            return False
        return await self._store.add(self._key, self._holder, LEASE_S)

    async def seize(self) -> None:
        """Take the job from its holder, which notices within RENEW_S, so that nobody computes it."""
        await self._store.set(self._key, REVOKED, LEASE_S)

    async def is_held(self) -> bool:
        """Return whether any ingress holds the job."""
        return await self._store.get(self._key) is not None

    async def holds(self) -> bool:
        """Return whether this holder has the job, and extend the lease if so."""
        return await self._store.replace(self._key, self._holder, self._holder, LEASE_S)

    async def release(self) -> None:
        await self._store.delete(self._key)

    @asynccontextmanager
    async def kept(self, on_taken: Callable[[], None] = _ignore) -> AsyncGenerator[None]:
        """Keep renewing the lease inside the block, and cancel the current task once it is lost. on_taken: called
        before that if another holder has the lease, and so computes the job."""
        task = asyncio.current_task()
        assert task is not None
        heartbeat = asyncio.create_task(self._heartbeat(task, on_taken))
        try:
            yield
        finally:
            heartbeat.cancel()

    async def _heartbeat(self, task: asyncio.Task[object], on_taken: Callable[[], None]) -> None:
        pause_s = RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                if not await self.renew():
                    if await self._store.get(self._key) != REVOKED:
                        on_taken()
                    task.cancel()
                pause_s = RENEW_S
            except StoreUnavailable:
                pause_s = RETRY_S


def lease_key(job_id: str) -> str:
    """Return the store key of a job's lease. No id that a client sends can make it equal to a record's key."""
    return f"manta:lease:{job_id}"

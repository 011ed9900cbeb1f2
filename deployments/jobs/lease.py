"""Which ingress works on a job."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from deployments.storage.key_value import KeyValueStore, StoreUnavailable

LEASE_S = 10.0
"""Time for which a job belongs to an ingress that gives no sign."""
RENEW_S = LEASE_S / 4
RETRY_S = 1.0
"""Until a lease is renewed again where the store has failed; shorter than the store takes to settle."""


async def _nothing() -> None: ...


class Lease:
    """One holder's claim on a job. It ends by itself when its ingress is silent, and another holder can seize it.

    Every method but `kept` raises StoreUnavailable.
    """

    def __init__(self, store: KeyValueStore, job_id: str, restore: Callable[[], Awaitable[None]] = _nothing):
        """restore: stores the job again, unless it is stored. Called where its lease was lost."""
        self._store, self._key, self._restore = store, lease_key(job_id), restore
        self._holder = secrets.token_hex(16).encode()

    async def take(self) -> bool:
        """Return whether the job is this holder's now, which it is unless it is another's."""
        return await self._store.add(self._key, self._holder, LEASE_S)

    async def renew(self) -> bool:
        """Return whether the job is still this holder's, or free, and then hold it for LEASE_S more."""
        if await self.holds():
            return True
        if await self.is_held():
            return False
        await self._restore()
        return await self.take()

    async def seize(self) -> None:
        """Take the job away from its holder, which notices within RENEW_S."""
        await self._store.set(self._key, self._holder, LEASE_S)

    async def is_held(self) -> bool:
        """Return whether an ingress works on the job."""
        return await self._store.get(self._key) is not None

    async def holds(self) -> bool:
        """Return whether the job is this holder's."""
        return await self._store.replace(self._key, self._holder, self._holder, LEASE_S)

    async def release(self) -> None:
        await self._store.delete(self._key)

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Renew the lease meanwhile, and cancel the present task once another holder has it."""
        task = asyncio.current_task()
        assert task is not None
        heartbeat = asyncio.create_task(self._heartbeat(task))
        try:
            yield
        finally:
            heartbeat.cancel()

    async def _heartbeat(self, task: asyncio.Task[object]) -> None:
        pause_s = RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                if not await self.renew():
                    task.cancel()
                pause_s = RENEW_S
            except StoreUnavailable:
                pause_s = RETRY_S


def lease_key(job_id: str) -> str:
    """Return the key of a job's lease in the store: no job's, for any stream id that a client sends."""
    return f"manta:lease:{job_id}"

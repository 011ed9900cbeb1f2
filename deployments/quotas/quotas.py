"""The limits of all API keys in one ingress."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from deployments.quotas.key_quota import KeyQuota, RequestQuota, _current, record_key
from deployments.quotas.limits import KeyLimits, Limit
from deployments.quotas.record import decode
from deployments.storage.key_value import KeyValueStore

RENEW_S = 1.0
"""Seconds between two writes of what an ingress has spent."""


class Quotas:
    def __init__(
        self,
        store: KeyValueStore,
        limits: Mapping[str, KeyLimits],
        num_ingresses: int = 1,
        wall: Callable[[], float] = time.time,
    ):
        """limits: by the names of keys; may be changed at any time. num_ingresses: number that use the store. wall:
        returns seconds since 1970."""
        self.limits = limits
        self._store, self._num_ingresses, self._wall = store, num_ingresses, wall
        self._holder = secrets.token_hex(8)
        self._keys: dict[str, KeyQuota] = {}
        self._used: set[KeyQuota] = set()
        self._renewal: asyncio.Task[None] | None = None

    def of(self, name: str) -> RequestQuota | None:
        """Return the quota of one request; None without limits. name: of its API key."""
        limits = self.limits.get(name)
        return None if limits is None else RequestQuota(self._key(name, limits))

    def models_of(self, name: str, allowed: frozenset[str] | None) -> frozenset[str] | None:
        """Return the models that the limits leave. allowed: those that the key itself allows; None for all."""
        limits = self.limits.get(name)
        if limits is None or limits.models is None:
            return allowed
        return frozenset(limits.models) if allowed is None else allowed & frozenset(limits.models)

    async def used(self, name: str, limits: KeyLimits) -> list[tuple[Limit, float, float]]:
        """Return what ingresses have used of each limit of a key, and now. Raises StoreUnavailable."""
        stored = await self._store.get(record_key(name))
        record, now = None if stored is None else decode(stored), self._wall()
        found = []
        for limit in limits.all():
            window = None if record is None else record.find(limit.name, limit.window(now)[0])
            found.append((limit, 0.0 if window is None else window.taken(), now))
        return found

    async def close(self) -> None:
        """Write what has been used."""
        if self._renewal is not None:
            self._renewal.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal
        await asyncio.gather(*(key.sync() for key in self._used))

    def _key(self, name: str, limits: KeyLimits) -> KeyQuota:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = KeyQuota(
                name, limits, self._store, self._holder, self._num_ingresses, wall=self._wall
            )
            key.on_charge = partial(self._keep, key)
        elif key.limits is not limits:
            key.change(limits)
        return key

    def _keep(self, key: KeyQuota) -> None:
        """Write what has been spent of a key, until nothing is left to write."""
        self._used.add(key)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Write what has been spent, as long as there is something to write or to give back."""
        while self._used:
            await asyncio.sleep(RENEW_S)
            keys = list(self._used)
            reached = await asyncio.gather(*(key.sync() for key in keys))
            self._used -= {key for key, done in zip(keys, reached, strict=True) if done and key.is_settled}


@contextmanager
def current(quota: RequestQuota | None) -> Iterator[None]:
    """Make this the quota of the HTTP request on which the current task works."""
    token = _current.set(quota)
    try:
        yield
    finally:
        _current.reset(token)

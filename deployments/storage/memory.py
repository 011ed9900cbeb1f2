"""Values in the memory of one ingress."""

from __future__ import annotations

import time
from collections import OrderedDict

from deployments.storage.key_value import KeyValueStore

MAX_VALUES = 100_000  # a second limit, besides max_bytes


class MemoryStore(KeyValueStore):
    """Store in this process's memory, which drops its oldest values when it is full."""

    shared = False

    def __init__(self, max_bytes: int):
        super().__init__()
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # (time of expiry, value), oldest first
        self._bytes = 0

    async def get(self, key: str) -> bytes | None:
        expires, value = self._values.get(key, (0.0, b""))
        return value if time.monotonic() < expires else None

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self.delete(key)
        if len(value) > self._max_bytes:
            raise self.unavailable(f"it has {len(value)} bytes, more than the store ({self._max_bytes})")
        self._values[key] = time.monotonic() + ttl_s, value
        self._bytes += len(value)
        while self._bytes > self._max_bytes or len(self._values) > MAX_VALUES or self._oldest_expired():
            await self.delete(next(iter(self._values)))

    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        if await self.get(key) != expected:
            return False
        await self.set(key, value, ttl_s)
        return True

    async def delete(self, key: str) -> None:
        _, value = self._values.pop(key, (0.0, b""))
        self._bytes -= len(value)

    async def close(self) -> None: ...

    def _oldest_expired(self) -> bool:
        return bool(self._values) and next(iter(self._values.values()))[0] <= time.monotonic()

"""Interface of a store of values that expire."""

from __future__ import annotations

import logging
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.errors import ServingError

logger = logging.getLogger(__name__)

T = TypeVar("T")
CHECKSUM_BYTES = 4
LOG_INTERVAL_S = 10.0  # between log lines about an unavailable store


class StoreUnavailable(ServingError):
    """The store does not answer, or is full."""

    status, type, retryable = 503, "service_unavailable_error", True

    def __init__(self, reason: str):
        super().__init__(reason)

    def __str__(self) -> str:
        return f"the store cannot be used: {self.args[0]}"


class StoredValueCorrupt(ServingError):
    """The stored value is not the one that was written."""

    def __init__(self, key: str):
        super().__init__(key)

    def __str__(self) -> str:
        return f"the stored value {self.args[0]} cannot be read; send the request again under another name"


class KeyValueStore(ABC):
    """Values by key. All methods raise StoreUnavailable."""

    shared: bool
    """Whether all ingresses see the same values, even after a restart."""

    def __init__(self) -> None:
        self.errors = {"unavailable": 0, "corrupt": 0}
        """Numbers of failed calls and of corrupt values."""
        self._logged_at = -LOG_INTERVAL_S

    def unavailable(self, reason: str) -> StoreUnavailable:
        """Count a failed call, and return its error."""
        self.errors["unavailable"] += 1
        if time.monotonic() >= self._logged_at + LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            logger.error("store unavailable calls_failed=%d reason=%s", self.errors["unavailable"], reason)
        return StoreUnavailable(reason)

    def unsealed(self, key: str, value: bytes, decode: Callable[[bytes], T]) -> T:
        """Return the decoded content of a value made by `sealed`. Raises StoredValueCorrupt."""
        try:
            if value != sealed(value[CHECKSUM_BYTES:]):
                raise msgspec.DecodeError("its checksum is wrong")
            return decode(value[CHECKSUM_BYTES:])
        except ValueError as error:  # corrupt, perhaps no UTF-8, or written by another version
            self.errors["corrupt"] += 1
            logger.error("stored value corrupt key=%s reason=%s", key, error)
            raise StoredValueCorrupt(key) from error

    @abstractmethod
    async def get(self, key: str) -> bytes | None: ...

    @abstractmethod
    async def set(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Set a value unless the key already has one. Returns whether it was set."""
        return await self.replace(key, None, value, ttl_s)

    @abstractmethod
    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        """Set a value if the key has the expected one, or no value if `expected` is None. Returns whether it was
        set."""

    @abstractmethod
    async def delete(self, key: str) -> None: ...

    async def settled(self) -> str:
        """Wait until all holders have had time to renew their leases after the store was unavailable. Call this before
        taking a lease. Returns which server has settled. Raises StoreUnavailable."""
        return ""  # most stores do not forget leases, nor end while others live

    @abstractmethod
    async def close(self) -> None:
        """Close the store. Returns once everything is written."""


def sealed(value: bytes) -> bytes:
    """Return a value with its checksum in front."""
    return zlib.crc32(value).to_bytes(CHECKSUM_BYTES, "little") + value

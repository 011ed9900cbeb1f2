"""Values by key that expire: what a store of any kind does."""

from __future__ import annotations

from typing import Protocol

from engine.errors import ServingError


class StoreUnavailable(ServingError):
    """The store does not answer, or has no room."""

    status, type, retryable = 503, "service_unavailable_error", True

    def __init__(self, reason: str):
        super().__init__(reason)

    def __str__(self) -> str:
        return f"the store cannot be used: {self.args[0]}"


class KeyValueStore(Protocol):
    """Values by key. Every method raises StoreUnavailable."""

    shared: bool
    """All ingresses see the same values, also after they were started again."""

    async def get(self, key: str) -> bytes | None: ...

    async def set(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Set a value, unless the key has one. Returns whether it was set."""

    async def extend(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Let a value live longer. Returns False, and does nothing, if the key has another or none."""

    async def delete(self, key: str) -> None: ...

    async def close(self) -> None:
        """Return once everything is written."""

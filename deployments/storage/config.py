"""Options of the store, and how long it keeps values."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from deployments.storage.key_value import KeyValueStore
from deployments.storage.memory import MemoryStore
from engine.errors import ConfigError

SQLITE, REDIS = "sqlite://", ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The store of responses, idempotent answers and batches. The first two expire."""

    url: str | None = None
    """`redis://host:6379/0`, `rediss://` for TLS, `sqlite:///path`; None for the memory of each ingress."""
    max_bytes: int = 256 * 2**20
    """Maximum size. A full store in memory drops its oldest values; a full file accepts no new values until some have
    expired. Redis has its own `maxmemory`."""
    response_ttl_s: float = 24 * 3600.0
    idempotency_ttl_s: float = 24 * 3600.0

    def check(self) -> None:
        """Raise ConfigError for a URL of an unknown kind, or if the Redis client is needed and not installed."""
        if self.url is None or self.url.startswith(f"{SQLITE}/"):
            return
        if not self.url.startswith(REDIS):
            raise ConfigError("ingress.store", self.url, "a URL like redis://host:6379/0 or sqlite:///path")
        if find_spec("redis") is None:
            limit = "left out, because redis is not installed (pip install 'manta-serve[redis]')"
            raise ConfigError("ingress.store", self.url, limit)


def open_store(config: StoreConfig) -> KeyValueStore:
    """Open the configured store. Raises ConfigError if its file cannot be opened."""
    if config.url is None:
        return MemoryStore(config.max_bytes)
    if config.url.startswith(SQLITE):
        from deployments.storage.sqlite import SqliteStore

        return SqliteStore(config.url.removeprefix(SQLITE), config.max_bytes)
    from deployments.storage.redis import RedisStore

    return RedisStore(config.url)

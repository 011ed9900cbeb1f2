"""Which store there is, and for how long values are kept in it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from deployments.storage.key_value import KeyValueStore
from deployments.storage.memory import MemoryStore
from engine.errors import ConfigError

SQLITE, REDIS = "sqlite://", ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The store of responses, of keyed answers and of batches, and how long it keeps the first two."""

    url: str | None = None
    """`redis://host:6379/0`, `rediss://` for TLS, `sqlite:///path`; None for the memory of each ingress."""
    max_bytes: int = 256 * 2**20
    """Limit in memory, where the oldest values are dropped, and of a file, which takes no more until some have expired.
    Redis has its own `maxmemory`."""
    response_ttl_s: float = 24 * 3600.0
    idempotency_ttl_s: float = 24 * 3600.0

    def check(self) -> None:
        """Raise ConfigError for a URL of another kind, or if the client of Redis is not installed."""
        if self.url is None or self.url.startswith(f"{SQLITE}/"):
            return
        if not self.url.startswith(REDIS):
            raise ConfigError("ingress.store", self.url, "a URL like redis://host:6379/0 or sqlite:///path")
        if find_spec("redis") is None:
            limit = "left out where redis is not installed (pip install 'manta-serve[redis]')"
            raise ConfigError("ingress.store", self.url, limit)


def open_store(config: StoreConfig) -> KeyValueStore:
    """Raises ConfigError for a file that cannot be opened."""
    if config.url is None:
        return MemoryStore(config.max_bytes)
    if config.url.startswith(SQLITE):
        from deployments.storage.sqlite import SqliteStore

        return SqliteStore(config.url.removeprefix(SQLITE), config.max_bytes)
    from deployments.storage.redis import RedisStore

    return RedisStore(config.url)

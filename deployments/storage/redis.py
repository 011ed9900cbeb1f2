"""Values in a Redis, for all ingresses of a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from deployments.storage.key_value import KeyValueStore

TIMEOUT_S = 2.0  # of each command, connecting included
EXTEND = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"


class RedisStore(KeyValueStore):
    shared = True

    def __init__(self, url: str):
        super().__init__()
        # one retry: a connection may have been closed while it was idle
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1))

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._run("get", key)
        return value

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._run("set", key, value, px=_ms(ttl_s))

    async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
        return await self._run("set", key, value, px=_ms(ttl_s), nx=True) is not None

    async def extend(self, key: str, value: bytes, ttl_s: float) -> bool:
        return bool(await self._run("eval", EXTEND, 1, key, value, _ms(ttl_s)))

    async def delete(self, key: str) -> None:
        await self._run("delete", key)

    async def close(self) -> None:
        await self._run("aclose")

    async def _run(self, command: str, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await getattr(self._redis, command)(*args, **options)
        except (RedisError, OSError, TimeoutError) as error:
            raise self.unavailable(f"{type(error).__name__}: {error}") from error


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))

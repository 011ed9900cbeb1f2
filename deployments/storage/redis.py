"""Values in a Redis, shared by all ingresses of a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from deployments.storage.key_value import KeyValueStore

TIMEOUT_S = 2.0  # of each command, connecting included
SETTLE_S = 3.0
"""Seconds without new leases after a Redis has become available or another has taken its place, perhaps without its
values."""
MAX_SETTLES = 4  # times that a call waits for a Redis that keeps restarting
REPLACE = "return redis.call('get',KEYS[1]) == ARGV[1] and redis.call('set',KEYS[1],ARGV[2],'px',ARGV[3]) and 1 or 0"


class RedisStore(KeyValueStore):
    shared = True

    def __init__(self, url: str):
        super().__init__()
        # one retry: a connection may have been closed while it was idle
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1))
        self._away, self._back_at, self._run_id = False, -SETTLE_S, ""

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._run("get", key)
        return value

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._run("set", key, value, px=_ms(ttl_s))

    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        if expected is None:
            return await self._run("set", key, value, px=_ms(ttl_s), nx=True) is not None
        return bool(await self._run("eval", REPLACE, 1, key, expected, value, _ms(ttl_s)))

    async def delete(self, key: str) -> None:
        await self._run("delete", key)

    async def settled(self) -> str:
        for _ in range(MAX_SETTLES):
            server, now = await self._run("info", "server"), asyncio.get_running_loop().time()
            if server["run_id"] != self._run_id:  # restarted, or replaced, since it was last used
                self._back_at = now if self._run_id else max(self._back_at, now - server["uptime_in_seconds"])
                self._run_id = server["run_id"]
            if now >= self._back_at + SETTLE_S:
                return str(server["run_id"])
            await asyncio.sleep(self._back_at + SETTLE_S - now)  # it may restart once more meanwhile
        raise self.unavailable(f"it has restarted {MAX_SETTLES} times within {MAX_SETTLES * SETTLE_S:.0f} s")

    async def close(self) -> None:
        await self._run("aclose")

    async def _run(self, command: str, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await getattr(self._redis, command)(*args, **options)
        except (RedisError, OSError, TimeoutError) as error:
            self._away = True
            raise self.unavailable(f"{type(error).__name__}: {error}") from error
        if self._away:
            self._away, self._back_at = False, asyncio.get_running_loop().time()
        return result


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))

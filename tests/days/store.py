"""The Redis of a simulated cluster, where ingresses keep answers. Only server and connections are modelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError

from deployments.jobs.record import JobRecord, record_key
from deployments.storage.key_value import CHECKSUM_BYTES
from deployments.storage.redis import REPLACE, RedisStore

if TYPE_CHECKING:
    from tests.days.cluster import Cluster

NODE = "store"
RECORD = msgspec.msgpack.Decoder(JobRecord).decode


class Redis:
    """The server. Its clock is that of the world."""

    def __init__(self, cluster: Cluster):
        self._loop = cluster.loop
        self._values: dict[str, tuple[float, bytes]] = {}  # by key: when it expires, value
        self._away_until = 0.0
        self._started_at, self._starts = float("-inf"), 0
        self.lost_at = float("-inf")  #: when it has last lost its values
        self._complete: set[str] = set()  # keys of the jobs whose whole answer it has had since then

    @property
    def is_away(self) -> bool:
        return self._loop.time() < self._away_until

    def go_away(self, seconds: float, *, forgets: bool) -> None:
        """End, and start again after some time. forgets: whether it has kept nothing on disk."""
        self._started_at = self._away_until = max(self._away_until, self._loop.time() + seconds)
        self._starts += 1
        if forgets:
            self._values.clear()
            self._complete.clear()
            self.lost_at = self._loop.time()

    def keys(self, prefix: str) -> list[str]:
        """Return the keys whose values have not expired."""
        return [key for key in self._values if key.startswith(prefix) and self.get(key) is not None]

    def is_complete(self, job_id: str) -> bool:
        """Return whether it has had the whole answer of a job, also if another value was written over it."""
        return record_key(job_id) in self._complete

    def get(self, key: str) -> bytes | None:
        expires, value = self._values.get(key, (0.0, b""))
        return value if self._loop.time() < expires else None

    def set(self, key: str, value: bytes, px: int, nx: bool = False) -> bool | None:
        if nx and self.get(key) is not None:
            return None
        self._values[key] = self._loop.time() + px / 1000, value
        if key.startswith(record_key("")) and RECORD(value[CHECKSUM_BYTES:]).outputs is not None:
            self._complete.add(key)
        return True

    def eval(self, script: str, _: int, key: str, expected: bytes, value: bytes, px: int) -> int:
        assert script == REPLACE
        return int(self.get(key) == expected and bool(self.set(key, value, px)))

    def info(self, section: str) -> dict[str, Any]:
        uptime = min(self._loop.time() - self._started_at, 1e9)
        return {"run_id": str(self._starts), "uptime_in_seconds": int(uptime)}

    def delete(self, key: str) -> None:
        self._values.pop(key, None)


class Connection:
    """In place of redis.asyncio.Redis, with its one retry."""

    def __init__(self, cluster: Cluster, node: str, is_up: Callable[[], bool]):
        self._cluster, self._node, self._is_up = cluster, node, is_up

    def __getattr__(self, command: str) -> Callable[..., Any]:
        async def run(*args: Any, **options: Any) -> Any:
            try:
                return await self._run(command, args, options)
            except RedisConnectionError:
                return await self._run(command, args, options)

        return run

    async def _run(self, command: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        redis, network = self._cluster.redis, self._cluster.network
        answer: asyncio.Future[Any] = self._cluster.loop.create_future()

        def settle(result: Any) -> None:
            if answer.done():
                return
            if redis.is_away:  # it may have carried out the command
                self._cluster.seen["an answer of the store is lost"] += not isinstance(result, RedisConnectionError)
                result = RedisConnectionError("the store is away")
            if isinstance(result, RedisConnectionError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def arrive() -> None:
            away = RedisConnectionError("the store is away")
            result = away if redis.is_away else getattr(redis, command)(*args, **options)
            network.send(NODE, self._node, "answers of the store", settle, result)

        if self._is_up():  # a process that is gone sends nothing, and waits for ever
            network.send(self._node, NODE, "commands to the store", arrive)
        return await answer


def open_store(cluster: Cluster, node: str, is_up: Callable[[], bool]) -> RedisStore:
    """Return the store as the ingress on this node sees it. is_up: whether its process is there."""
    store = RedisStore("redis://store")
    store._redis = Connection(cluster, node, is_up)  # type: ignore[assignment]
    return store

"""Stored responses: in the memory of one ingress, or in Redis for all of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import msgspec

from deployments.openai.responses.errors import ResponseNotFound, StoreUnavailable
from deployments.openai.responses.items import Item, ItemReference, invalid, parsed
from deployments.openai.responses.response_body import LIVE, Response, ResponseError
from engine.errors import ConfigError, InvalidParameter

MAX_RESPONSES = 100_000  # in memory, besides max_bytes
REDIS_TIMEOUT_S = 2.0  # of each command, connecting included
LEASE_S = 15.0
"""How long a background response counts as running without a sign of its ingress."""
MAX_REFERENCED = 256  # responses that the item references of one request may lead to
KNOWN_ITEM = "the id of an item of a stored response"
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStoreConfig:
    """Where responses are stored, and for how long."""

    url: str | None = None
    """`redis://host:6379/0`, or `rediss://` for TLS; None keeps responses in the memory of each ingress."""
    ttl_s: float = 24 * 3600.0
    max_bytes: int = 256 * 2**20
    """Limit in memory; the oldest responses are dropped. Redis has its own `maxmemory`."""

    def check(self) -> None:
        """Raise ConfigError for a URL of another kind, or if the client of Redis is not installed."""
        if self.url is None:
            return
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("ingress.response_store", self.url, "a URL like redis://host:6379/0")
        if find_spec("redis") is None:
            limit = "left out where redis is not installed (pip install 'manta-serve[redis]')"
            raise ConfigError("ingress.response_store", self.url, limit)


class StoredResponse(msgspec.Struct):
    response: Response
    earlier: list[Item]
    """Items of the conversation before this request."""
    input: list[Item]
    """Items that the request brought, each with an id."""
    events: list[bytes] = []
    """The stream of a background response that was created as a stream."""

    @property
    def conversation(self) -> list[Item]:
        return [*self.earlier, *self.input, *self.output]

    @property
    def output(self) -> list[Item]:
        items: list[Item] = msgspec.to_builtins(self.response.output)
        return items


class Backend(Protocol):
    """Values by key. Raises StoreUnavailable."""

    async def get(self, key: str) -> bytes | None: ...

    async def set(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def delete(self, key: str) -> None: ...


class MemoryBackend:
    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # with the time they expire; oldest first
        self._bytes = 0

    async def get(self, key: str) -> bytes | None:
        expires, value = self._values.get(key, (0.0, b""))
        return value if time.monotonic() < expires else None

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self.delete(key)
        if len(value) > self._max_bytes:
            raise StoreUnavailable(f"it has {len(value)} bytes, more than the store ({self._max_bytes})")
        self._values[key] = time.monotonic() + ttl_s, value
        self._bytes += len(value)
        while self._bytes > self._max_bytes or len(self._values) > MAX_RESPONSES or self._oldest_expired():
            await self.delete(next(iter(self._values)))

    async def delete(self, key: str) -> None:
        _, value = self._values.pop(key, (0.0, b""))
        self._bytes -= len(value)

    def _oldest_expired(self) -> bool:
        return bool(self._values) and next(iter(self._values.values()))[0] <= time.monotonic()


class RedisBackend:
    def __init__(self, url: str):
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        # one retry: a connection may have been closed while it was idle
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1))
        self._error = RedisError

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._run("get", key)
        return value

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._run("set", key, value, px=round(ttl_s * 1000))

    async def delete(self, key: str) -> None:
        await self._run("delete", key)

    async def _run(self, command: str, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                return await getattr(self._redis, command)(*args, **options)
        except (self._error, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error


class ResponseStore:
    """Responses by owner, the name of an API key, and id. Nobody finds another owner's."""

    def __init__(self, config: ResponseStoreConfig):
        self._config = config
        self._backend: Backend = MemoryBackend(config.max_bytes) if config.url is None else RedisBackend(config.url)

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound, StoreUnavailable."""
        value = await self._backend.get(_key(owner, response_id))
        if value is None:
            raise ResponseNotFound(response_id, self._config.ttl_s, shared=self._config.url is not None)
        stored = msgspec.json.decode(value, type=StoredResponse)
        response = stored.response
        if response.status in LIVE and not await self._backend.get(_key(owner, response_id, "lease")):
            message = "its ingress has ended, or could not store the result"
            response.status, response.error = "failed", ResponseError("server_error", message)
        return stored

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Raises StoreUnavailable."""
        value = msgspec.json.encode(stored)  # it may have numbers that are too large for MessagePack
        await self._backend.set(_key(owner, stored.response.id), value, self._config.ttl_s)

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises StoreUnavailable."""
        await self._backend.delete(_key(owner, response_id))

    async def renew_lease(self, owner: str, response_id: str) -> bool:
        """Let a background response count as running for LEASE_S, and return whether it is to be cancelled."""
        await self._backend.set(_key(owner, response_id, "lease"), b"1", LEASE_S)
        return await self._backend.get(_key(owner, response_id, "cancel")) is not None

    async def ask_to_cancel(self, owner: str, response_id: str) -> None:
        """Tell the ingress that runs a background response, whichever it is."""
        await self._backend.set(_key(owner, response_id, "cancel"), b"1", LEASE_S)

    async def resolve(self, owner: str, items: list[Item]) -> list[Item]:
        """Return the items with references replaced by what they refer to. Raises RequestError, StoreUnavailable."""
        found: dict[str, dict[str, Item]] = {}  # by id of the response, then of the item
        resolved = []
        for i, item in enumerate(items):
            if item.get("type") != "item_reference":
                resolved.append(item)
                continue
            reference = parsed(ItemReference, item, f"input[{i}]").id
            match = ITEM_ID.fullmatch(reference)
            if match is None:
                raise invalid(f"input[{i}].id", reference, KNOWN_ITEM)
            response_id = f"resp_{match[1]}"
            if response_id not in found:
                if len(found) == MAX_REFERENCED:
                    raise InvalidParameter("input", len(items), f"references to at most {MAX_REFERENCED} responses")
                stored = await self.get(owner, response_id)
                found[response_id] = {entry["id"]: entry for entry in [*stored.input, *stored.output]}
            if reference not in found[response_id]:
                raise invalid(f"input[{i}].id", reference, KNOWN_ITEM)
            resolved.append(found[response_id][reference])
        return resolved


def _key(owner: str, response_id: str, what: str = "response") -> str:
    return f"manta:{what}:{owner}:{response_id}"

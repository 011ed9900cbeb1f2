"""Objects of the API, in a store shared by all ingresses."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from deployments.openai.batches.errors import ObjectNotFound
from deployments.storage.key_value import KeyValueStore, sealed

DIGITS = 16  # of an id for its time of creation; as many random digits follow
NAMES_TTL_S = 120 * 24 * 3600.0  # after the last change of a list; no object lives longer


class HasId(Protocol):
    id: str


T = TypeVar("T", bound=HasId)


class Record(msgspec.Struct, Generic[T]):
    """An object with its owner."""

    owner: str | None
    """Name of the API key; None on a server without keys."""
    object: T

    def encode(self) -> bytes:
        return sealed(msgspec.json.encode(self))


R = TypeVar("R", bound=Record[Any])


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed. Ids sort by time of creation."""
    return f"{prefix}{time.time_ns():0{DIGITS}x}{secrets.token_hex(DIGITS // 2)}"


def age_s(object_id: str, prefix: str) -> float:
    return time.time() - int(object_id.removeprefix(prefix)[:DIGITS], 16) / 1e9


def object_key(object_id: str) -> str:
    return f"manta:object:{object_id}"


class Names:
    """A list of ids that any ingress may change. Methods raise StoreUnavailable."""

    def __init__(self, store: KeyValueStore, name: str):
        self._store, self._key = store, f"manta:names:{name}"

    async def all(self) -> list[str]:
        """Return the ids, oldest first."""
        return (await self._store.get(self._key) or b"").decode().split()

    async def add(self, object_id: str) -> None:
        await self._change(lambda ids: ids | {object_id})

    async def remove(self, object_id: str) -> None:
        await self._change(lambda ids: ids - {object_id})

    async def _change(self, change: Callable[[set[str]], set[str]]) -> None:
        changed = False
        while not changed:
            found = await self._store.get(self._key)
            ids = " ".join(sorted(change(set((found or b"").decode().split())))).encode()
            changed = await self._store.replace(self._key, found, ids, NAMES_TTL_S)


class Records(Generic[R]):
    """All objects of one kind: a value per object, and a list of ids per owner. Methods raise StoreUnavailable."""

    def __init__(self, store: KeyValueStore, prefix: str, kind: type[R]):
        self._store, self._prefix, self._decoder = store, prefix, msgspec.json.Decoder(kind)
        self._id = re.compile(rf"{prefix}[0-9a-f]{{{2 * DIGITS}}}")

    async def add(self, record: R, ttl_s: float) -> None:
        """Store an object, unless it is already stored."""
        await self._store.add(object_key(record.object.id), record.encode(), ttl_s)
        await self._names(record.owner).add(record.object.id)

    async def find(self, object_id: str) -> R | None:
        """Return the object with this id, or None. Raises StoredValueCorrupt."""
        if self._id.fullmatch(object_id) is None:
            return None
        value = await self._store.get(key := object_key(object_id))
        return None if value is None else self._store.unsealed(key, value, self._decoder.decode)

    async def get(self, object_id: str, owner: str | None) -> R:
        """Return an object of this owner. Raises ObjectNotFound."""
        record = await self.find(object_id)
        if record is None or record.owner != owner:
            raise ObjectNotFound(object_id)
        return record

    async def remove(self, record: R) -> None:
        await self._store.delete(object_key(record.object.id))
        await self._names(record.owner).remove(record.object.id)

    async def page(
        self,
        owner: str | None,
        limit: int,
        after: str | None,
        *,
        newest_first: bool = True,
        wanted: Callable[[Any], bool] = lambda _: True,
    ) -> tuple[list[Any], bool]:
        """Return up to `limit` objects of this owner that follow `after`, and whether there are more."""
        found: list[Any] = []
        for object_id in sorted(await self._names(owner).all(), reverse=newest_first):
            beyond = after is None or (object_id < after if newest_first else object_id > after)
            if beyond and (record := await self.find(object_id)) is not None and wanted(record.object):
                if len(found) == limit:
                    return found, True
                found.append(record.object)
        return found, False

    def _names(self, owner: str | None) -> Names:
        return Names(self._store, f"{self._prefix}{owner or ''}")

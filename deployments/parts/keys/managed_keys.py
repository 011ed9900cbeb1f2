"""API keys and limits that were changed while the server runs. The store has them, the keys only as digests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pydantic

from deployments.frontend.api_keys import ApiKey, ApiKeys
from deployments.quotas.limits import KeyLimits
from deployments.quotas.quotas import Quotas
from deployments.storage.key_value import KeyValueStore, StoreUnavailable, sealed
from engine.errors import InvalidParameter

logger = logging.getLogger(__name__)

STORED = "manta:api_keys"
POLL_S = 1.0
"""Seconds after which an ingress notices a change at the latest, if the store answers."""
TTL_S = 100 * 365 * 86400.0
TRIES = 16  # to write before another ingress does
KEEP_DELETED_S = 60 * 86400.0
"""Seconds for which the limits of a deleted name still apply to the batches and background responses that it has begun;
longer than any of these lasts."""


class ManagedKey(msgspec.Struct):
    """All keys of one name."""

    digests: list[str] = []
    """Of the keys that are not in the configuration."""
    limits: dict[str, Any] | None = None
    """Fields of KeyLimits, in place of those of the configuration; None for those."""
    deleted_at: float | None = None
    """Seconds since 1970; None while the name is in use."""

    def read_limits(self) -> KeyLimits | None:
        """Raises pydantic.ValidationError."""
        return None if self.limits is None else KeyLimits.model_validate(self.limits)


class StoredTable(msgspec.Struct):
    version: int = 0
    keys: dict[str, Any] = {}


class KeyTable(msgspec.Struct):
    version: int = 0
    """Number of changes."""
    keys: dict[str, ManagedKey] = {}
    """By name."""
    unreadable: dict[str, Any] = {}
    """Keys that are none for this version of Manta, by name. They are refused, and kept as they are."""

    @classmethod
    def decode(cls, value: bytes) -> KeyTable:
        """Raises msgspec.DecodeError."""
        stored = _decode(value)
        table = cls(stored.version)
        for name, each in stored.keys.items():
            try:
                key = msgspec.convert(each, ManagedKey)
                key.read_limits()
                table.keys[name] = key
            except (msgspec.ValidationError, pydantic.ValidationError):
                table.unreadable[name] = each
        return table

    def encode(self) -> bytes:
        """Raises ValueError if what is written could not be read again."""
        value = msgspec.json.encode(StoredTable(self.version, self.unreadable | self.keys))
        if KeyTable.decode(value) != self:
            raise ValueError("a record of API keys could not be read again")
        return value

    def check_readable(self, name: str) -> None:
        """Raise InvalidParameter for a key that cannot be read."""
        if name in self.unreadable:
            raise InvalidParameter("key_alias", name, "a key whose stored record can be read; delete it first")


class ManagedKeys:
    def __init__(self, store: KeyValueStore, api_keys: ApiKeys, quotas: Quotas, configured: Mapping[str, KeyLimits]):
        """configured: limits of the configuration, by name."""
        self._store, self._api_keys, self._quotas, self._configured = store, api_keys, quotas, configured
        self._value: bytes | None = None
        self.table = KeyTable()

    @asynccontextmanager
    async def followed(self) -> AsyncGenerator[None]:
        """Follow the changes of other ingresses inside the block."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()

    async def change(self, edit: Callable[[KeyTable], None]) -> None:
        """Apply a change, which may be tried several times. Raises StoreUnavailable, StoredValueCorrupt, and what
        `edit` raises."""
        for _ in range(TRIES):
            stored = await self._read()
            table = self._decoded(stored)
            edit(table)
            since = time.time() - KEEP_DELETED_S
            table.keys = {name: key for name, key in table.keys.items() if (key.deleted_at or since) >= since}
            table.version += 1
            new = sealed(table.encode())
            if await self._store.replace(STORED, stored, new, TTL_S):
                self._use(new)
                return
        raise StoreUnavailable("other ingresses change the keys all the time")

    @property
    def names(self) -> set[str]:
        """Names of keys that were made here, and those for which the configuration has limits."""
        made = {name for name, key in self.table.keys.items() if key.deleted_at is None}
        return made | self.table.unreadable.keys() | self._configured.keys()

    def knows(self, name: str) -> bool:
        """Return whether a key of this name was made here or is in the configuration."""
        return name in self.names or self._api_keys.has_name(name)

    def is_configured(self, digest: str) -> bool:
        """Return whether the configuration has the key with this digest."""
        return self._api_keys.has_digest(digest)

    def delete(self, table: KeyTable, name: str) -> bool:
        """Delete the keys of a name from the table. Limits that only the table has stay in force for what the name has
        begun. Returns False if there is nothing to delete."""
        if table.unreadable.pop(name, None) is not None:
            return True
        key = table.keys.get(name)
        if key is None or key.deleted_at is not None:
            return False
        if key.limits is None or name in self._configured:
            del table.keys[name]
        else:
            key.digests, key.deleted_at = [], time.time()
        return True

    def limits_of(self, name: str) -> KeyLimits:
        return self._quotas.limits.get(name, KeyLimits())

    async def _follow(self) -> None:
        while True:
            try:
                value = await self._read()
                if value is not None and value != self._value:
                    self._use(value)
            except Exception as error:  # noqa: BLE001  keep this task running, with the keys as they were
                logger.error("API keys of the store stay as they were: %s", error)
            await asyncio.sleep(POLL_S)

    async def _read(self) -> bytes | None:
        """Return what is stored. If the store has lost it, store again what was known."""
        stored = await self._store.get(STORED)
        known = self._value
        if known is not None and self._decoded(stored).version < self.table.version:
            await self._store.replace(STORED, stored, known, TTL_S)
            stored = await self._store.get(STORED)
        return stored

    def _decoded(self, stored: bytes | None) -> KeyTable:
        return KeyTable() if stored is None else self._store.unsealed(STORED, stored, KeyTable.decode)

    def _use(self, value: bytes) -> None:
        before, self._value, self.table = self.table, value, self._decoded(value)
        for name in self.table.unreadable.keys() - before.unreadable.keys():
            logger.error(
                "the stored record of API key %r cannot be read; its keys are refused until it is deleted", name
            )
        changed = {name: limits for name, key in self.table.keys.items() if (limits := key.read_limits()) is not None}
        self._quotas.limits = {**self._configured, **changed}
        self._api_keys.managed = {
            digest: ApiKey(name, None) for name, key in self.table.keys.items() for digest in key.digests
        }
        logger.info("API keys of the store read keys=%d", len(self._api_keys.managed))


_decode = msgspec.json.Decoder(StoredTable).decode

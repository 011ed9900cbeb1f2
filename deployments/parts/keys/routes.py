"""Routes that make API keys and change their limits while the server runs, with LiteLLM's paths and fields."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
import pydantic
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from deployments.edge_part import EdgePart
from deployments.frontend.api_keys import ApiKeys, hash_key
from deployments.http.context import check_admin, key_name
from deployments.http.json_body import json_response, read_json
from deployments.http.route import ADMIN, OWNER, Route
from deployments.http.validation import ForeignFields, validation_error
from deployments.parts.keys.managed_keys import KeyTable, ManagedKey, ManagedKeys
from deployments.quotas.limits import KeyLimits
from deployments.quotas.quotas import Quotas
from deployments.storage.key_value import KeyValueStore
from engine.errors import Described, InvalidParameter, RequestError

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,255}$"
KEY = r"^[!-~]{16,1024}$"  # what a header can have, and so many characters because only a plain hash protects it
KEYS = "makes, changes and deletes keys of any name"

Fields = TypeVar("Fields", bound=BaseModel)


class GenerateKeyBody(KeyLimits):
    key_alias: str = Field(pattern=NAME)
    """Name of the key. Keys of one name share their limits."""
    key: str | None = Field(default=None, pattern=KEY)
    """The key; None to have a new one made."""


class UpdateKeyBody(KeyLimits):
    """Limits that are left out stay as they are; null removes one."""

    key_alias: str = Field(min_length=1, max_length=256)
    """Name of a key that there is, also one of the configuration."""


class DeleteKeyBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key_aliases: list[Annotated[str, Field(max_length=256)]] = Field(default=[], max_length=1000)
    keys: list[Annotated[str, Field(max_length=1024)]] = Field(default=[], max_length=1000)


class KeyQuery(BaseModel):
    key_alias: str | None = None
    """Name of the key; None for the key of the request."""


class NewKey(msgspec.Struct):
    key: str
    """Shown only now."""
    key_alias: str


class DeletedKeys(msgspec.Struct):
    deleted_keys: list[str]


class LimitUse(msgspec.Struct):
    limit: float
    used: float
    """What was spent, and what ingresses have reserved."""
    reset_at: str | None
    """When counting begins again; None if nothing is used up."""


class KeyInfo(msgspec.Struct):
    key_alias: str
    limits: dict[str, Any]
    used: dict[str, LimitUse]


class KeyList(msgspec.Struct):
    keys: list[str]
    """Names of the keys that were made here, or whose limits were."""


class KeyRoutes(EdgePart):
    def __init__(self, keys: ManagedKeys, quotas: Quotas):
        self._keys, self._quotas = keys, quotas

    @classmethod
    def of(
        cls, store: KeyValueStore, api_keys: ApiKeys, quotas: Quotas, configured: Mapping[str, KeyLimits]
    ) -> KeyRoutes:
        """configured: limits of the configuration, by the names of keys."""
        return cls(ManagedKeys(store, api_keys, quotas, configured), quotas)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._keys.followed()

    def routes(self) -> list[Route]:
        make, change = "Make an API key.", "Change the limits of an API key."
        info, delete = "Limits of an API key, and what was used of them.", "Delete API keys."
        others = "limits and use of every key, to admins only"
        return [
            Route(
                ADMIN, "POST", "/key/generate", self.generate, make, body=GenerateKeyBody, result=NewKey, of_others=KEYS
            ),
            Route(
                ADMIN, "POST", "/key/update", self.update, change, body=UpdateKeyBody, result=KeyInfo, of_others=KEYS
            ),
            Route(
                ADMIN,
                "POST",
                "/key/delete",
                self.delete,
                delete,
                body=DeleteKeyBody,
                result=DeletedKeys,
                of_others=KEYS,
            ),
            Route(
                OWNER,
                "GET",
                "/key/info",
                self.info,
                info,
                body=KeyQuery,
                result=KeyInfo,
                of_others=others,
            ),
            Route(
                ADMIN,
                "GET",
                "/key/list",
                self.list_keys,
                "Names of API keys.",
                result=KeyList,
                of_others="names of the keys",
            ),
        ]

    async def generate(self, request: Request) -> Response:
        body = await _read(request, GenerateKeyBody)
        key = body.key or f"sk-{secrets.token_urlsafe(32)}"
        limits = _limits(body, KeyLimits())

        def edit(table: KeyTable) -> None:
            digest = hash_key(key)
            if self._keys.is_configured(digest) or any(digest in known.digests for known in table.keys.values()):
                raise InvalidParameter("key", Described("one that exists"), "a new key")
            table.check_readable(body.key_alias)
            if (entry := table.keys.get(body.key_alias)) is None or entry.deleted_at is not None:
                entry = table.keys[body.key_alias] = ManagedKey()
            entry.digests.append(digest)
            if body.model_fields_set - {"key_alias", "key"}:
                entry.limits = limits

        await self._keys.change(edit)
        return json_response(NewKey(key, body.key_alias))

    async def update(self, request: Request) -> Response:
        body = await _read(request, UpdateKeyBody)

        def edit(table: KeyTable) -> None:
            table.check_readable(body.key_alias)
            if body.key_alias not in table.keys and not self._keys.knows(body.key_alias):
                raise InvalidParameter("key_alias", body.key_alias, "the name of a key")
            entry = table.keys.setdefault(body.key_alias, ManagedKey())
            entry.limits = _limits(body, self._keys.limits_of(body.key_alias))

        await self._keys.change(edit)
        return json_response(await self._info(body.key_alias))

    async def delete(self, request: Request) -> Response:
        body = await _read(request, DeleteKeyBody)
        digests = {hash_key(key): key for key in body.keys}
        deleted: list[str] = []

        def edit(table: KeyTable) -> None:
            deleted.clear()
            for name in body.key_aliases:
                if self._keys.delete(table, name):
                    deleted.append(name)
            for name, entry in list(table.keys.items()):
                found = [digest for digest in entry.digests if digest in digests]
                entry.digests = [digest for digest in entry.digests if digest not in digests]
                deleted.extend(name for _ in found)
            if not deleted:
                raise RequestError("none of these keys was made here; keys of the configuration are deleted there")

        await self._keys.change(edit)
        return json_response(DeletedKeys(deleted))

    async def info(self, request: Request) -> Response:
        """Answer about the key of the request, or, to an admin, about any key."""
        name = request.query_params.get("key_alias") or key_name(request) or ""
        if name != key_name(request):
            await check_admin(request)
        return json_response(await self._info(name))

    async def list_keys(self, request: Request) -> Response:
        return json_response(KeyList(sorted(self._keys.names)))

    async def _info(self, name: str) -> KeyInfo:
        limits = self._keys.limits_of(name)
        used = {
            limit.name: LimitUse(limit.value, taken, None if limit.duration is None else _date(limit.window(now)[1]))
            for limit, taken, now in await self._quotas.used(name, limits)
        }
        return KeyInfo(name, limits.model_dump(mode="json", exclude_defaults=True), used)


async def _read(request: Request, kind: type[Fields]) -> Fields:
    try:
        return kind.model_validate_json(await read_json(request))
    except pydantic.ValidationError as error:
        raise validation_error(error, ForeignFields()) from None


def _limits(given: KeyLimits, before: KeyLimits) -> dict[str, Any]:
    """Return the limits that a body sets. before: the others."""
    fields = KeyLimits.model_fields.keys() & given.model_fields_set
    changed = {name: getattr(given, name) for name in fields}
    return KeyLimits(**{**dict(before), **changed}).model_dump(mode="json")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

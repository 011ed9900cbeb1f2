"""Stored responses, by owner and id."""

from __future__ import annotations

import re

import msgspec

from deployments.openai.responses.errors import ResponseNotFound
from deployments.openai.responses.items import Item, ItemReference, invalid, parsed
from deployments.openai.responses.response_body import LIVE, Response, ResponseError
from deployments.storage.key_value import KeyValueStore, sealed
from engine.errors import InvalidParameter

LEASE_S = 15.0
"""How long a background response counts as running without a sign of its ingress."""
MAX_REFERENCED = 256  # responses that the item references of one request may lead to
KNOWN_ITEM = "the id of an item of a stored response"
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")


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


class ResponseStore:
    """Responses by owner, the name of an API key, and id. Nobody finds another owner's."""

    def __init__(self, values: KeyValueStore, ttl_s: float):
        self._values, self._ttl_s = values, ttl_s

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound, StoreUnavailable, StoredValueCorrupt."""
        value = await self._values.get(key := _key(owner, response_id))
        if value is None:
            raise ResponseNotFound(response_id, self._ttl_s, self._values.shared)
        stored = self._values.unsealed(key, value, msgspec.json.Decoder(StoredResponse).decode)
        response = stored.response
        if response.status in LIVE and not await self._values.get(_key(owner, response_id, "lease")):
            message = "its ingress has ended, or could not store the result"
            response.status, response.error = "failed", ResponseError("server_error", message)
        return stored

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Raises StoreUnavailable."""
        value = msgspec.json.encode(stored)  # it may have numbers that are too large for MessagePack
        await self._values.set(_key(owner, stored.response.id), sealed(value), self._ttl_s)

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises StoreUnavailable."""
        await self._values.delete(_key(owner, response_id))

    async def renew_lease(self, owner: str, response_id: str) -> bool:
        """Let a background response count as running for LEASE_S, and return whether it is to be cancelled."""
        await self._values.set(_key(owner, response_id, "lease"), b"1", LEASE_S)
        return await self._values.get(_key(owner, response_id, "cancel")) is not None

    async def ask_to_cancel(self, owner: str, response_id: str) -> None:
        """Tell the ingress that runs a background response, whichever it is."""
        await self._values.set(_key(owner, response_id, "cancel"), b"1", LEASE_S)

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

"""Stored responses, by owner and id."""

from __future__ import annotations

import re

import msgspec

from deployments.openai.responses.errors import ResponseNotFound
from deployments.openai.responses.items import Item, ItemReference, invalid, parsed
from deployments.openai.responses.response_body import Response
from deployments.storage.key_value import KeyValueStore, sealed
from engine.errors import Described, InvalidParameter

MAX_REFERENCED = 256  # responses to which the item references of one request may refer
KNOWN_ITEM = "the id of an item of a stored response"
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")


class StoredResponse(msgspec.Struct):
    response: Response
    earlier: list[Item]
    """Items of the conversation before this request."""
    input: list[Item]
    """Items of the request itself, each with an id."""
    job_id: str = ""
    """Id of the job that computes a background response."""
    events: list[bytes] = []
    """Events of a background response that was created as a stream."""
    session_id: str = ""
    """Session of its request, and of those that continue it and name no other one."""

    @property
    def conversation(self) -> list[Item]:
        return [*self.earlier, *self.input, *self.output]

    @property
    def output(self) -> list[Item]:
        items: list[Item] = msgspec.to_builtins(self.response.output)
        return items


class ResponseStore:
    """Responses by owner (the name of an API key) and id. Owners cannot access each other's responses."""

    def __init__(self, values: KeyValueStore, ttl_s: float):
        self._values, self._ttl_s = values, ttl_s

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises ResponseNotFound, StoreUnavailable, StoredValueCorrupt."""
        stored = await self.find(owner, response_id)
        if stored is None:
            raise ResponseNotFound(response_id, self._ttl_s, self._values.shared)
        return stored

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None. Raises StoreUnavailable, StoredValueCorrupt."""
        value = await self._values.get(key := _key(owner, response_id))
        return None if value is None else self._values.unsealed(key, value, msgspec.json.Decoder(StoredResponse).decode)

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response. Raises StoreUnavailable."""
        value = msgspec.json.encode(stored)  # its numbers may be too large for MessagePack
        await self._values.set(_key(owner, stored.response.id), sealed(value), self._ttl_s)

    async def delete(self, owner: str, response_id: str) -> None:
        await self._values.delete(_key(owner, response_id))

    async def resolve(self, owner: str, items: list[Item]) -> list[Item]:
        """Return the items with references replaced by the items they refer to. Raises RequestError,
        StoreUnavailable."""
        found: dict[str, dict[str, Item]] = {}  # by response id, then by item id
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
                    limit = f"a list with references to at most {MAX_REFERENCED} responses"
                    raise InvalidParameter("input", Described("more"), limit)
                stored = await self.get(owner, response_id)
                found[response_id] = {entry["id"]: entry for entry in [*stored.input, *stored.output]}
            if reference not in found[response_id]:
                raise invalid(f"input[{i}].id", reference, KNOWN_ITEM)
            resolved.append(found[response_id][reference])
        return resolved


def _key(owner: str, response_id: str) -> str:
    return f"manta:response:{owner}:{response_id}"

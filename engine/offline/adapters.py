"""The adapters that offline requests name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from engine.errors import InvalidParameter, RequestError
from engine.wire.parts.adapter import ModelAdapter


@runtime_checkable
class AdapterRequest(Protocol):
    """How a caller names an adapter of some kind."""

    def with_digest(self) -> Self:
        """Return it with the digest of the adapter's files as they are now. Raises InvalidParameter for an adapter that
        cannot be read."""

    def adapter(self) -> ModelAdapter:
        """Return the record by which requests name the adapter to an engine."""


AdapterRequests = AdapterRequest | Sequence[AdapterRequest | None] | None
"""One adapter for all prompts, or one for each; None for the model itself."""


def with_digests(requests: AdapterRequests, count: int) -> list[AdapterRequest | None]:
    """Return the adapter of each of `count` prompts, with the digest of its files as they are now. Raises RequestError
    for another number of adapters, and InvalidParameter for one that cannot be read."""
    if requests is None or isinstance(requests, AdapterRequest):
        requests = [requests] * count
    if len(requests) != count:
        raise RequestError(f"lora_request has {len(requests)} entries for {count} prompts", "lora_request")
    known: dict[AdapterRequest, AdapterRequest] = {}
    for each in filter(None, requests):
        if not isinstance(each, AdapterRequest):
            raise InvalidParameter("lora_request", each, "LoRARequest(lora_name, lora_int_id, lora_path)")
        if each not in known:
            known[each] = each.with_digest()
    return [each and known[each] for each in requests]


def adapter_of(request: AdapterRequest | None) -> ModelAdapter | None:
    return None if request is None else request.adapter()

"""The adapters that offline requests name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.errors import InvalidParameter, RequestError
from engine.offline.lora_request import LoRARequest
from engine.parts.table import part_modules
from engine.wire.parts.adapter import ModelAdapter

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each; None for the model itself."""


def with_digests(lora_requests: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts, with the digest of its files as they are now. Raises RequestError
    for another number of adapters, and InvalidParameter for one that cannot be read."""
    if lora_requests is None or isinstance(lora_requests, LoRARequest):
        lora_requests = [lora_requests] * count
    if len(lora_requests) != count:
        raise RequestError(f"lora_request has {len(lora_requests)} entries for {count} prompts", "lora_request")
    known: dict[LoRARequest, LoRARequest] = {}
    for lora in filter(None, lora_requests):
        if not isinstance(lora, LoRARequest) or not (lora.lora_path and isinstance(lora.lora_path, str)):
            raise InvalidParameter("lora_request", lora, "LoRARequest(lora_name, lora_int_id, lora_path)")
        if lora not in known:
            known[lora] = msgspec.structs.replace(lora, digest=lora.digest or digest_of_files(lora.adapter))
    return [lora and known[lora] for lora in lora_requests]


def digest_of_files(adapter: ModelAdapter) -> str:
    """Return the digest of an adapter's files, which its part reads; empty if there is no such part, as engines refuse
    the adapter then. Raises InvalidParameter if it cannot be read."""
    return next((module.digest_of_files(adapter) for module in part_modules("adapter_files")), "")


def adapter_of(lora: LoRARequest | None) -> ModelAdapter | None:
    return None if lora is None else lora.adapter

"""KV of the prefix caches of other engines."""

from __future__ import annotations

from typing import ClassVar

from engine.wire.part_record import PartRecord
from engine.wire.remote_request import Peer


class KVHolder(PartRecord, frozen=True, array_like=True):
    """Another engine that has more of the prompt in its prefix cache than the engine that gets the request, as a router
    expects."""

    part: ClassVar[str] = "kv_fetching"
    is_hint: ClassVar[bool] = True

    engine: Peer
    num_tokens: int


class FetchStats(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "kv_fetching"

    fetches: dict[str, int]
    """Prompts of which another engine had more cached, by outcome: `received` or `failed` if that KV was fetched, and
    `costs_more` if computing it was expected to be faster."""
    fetched_tokens: int
    """Prompt tokens whose KV was fetched."""

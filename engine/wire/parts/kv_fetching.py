"""KV of the prefix caches of other engines."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.messages import Question
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


class ListHotPrefixes(Question, frozen=True):
    """Ask for the most used cached prefixes, at most `limit` of them. Answered by HotPrefixes, unless other engines
    cannot fetch from this one."""

    limit: int


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that an engine has cached, and with which requests begin."""

    token_ids: list[int]
    cache_salt: str
    uses: int
    """Number of requests that began with exactly this cached prefix."""
    num_bytes: int
    """Size of its KV on all ranks."""


class HotPrefixes(msgspec.Struct, frozen=True):
    """Answers ListHotPrefixes."""

    peer: Peer
    prefixes: list[HotPrefix]
    """The most used first."""

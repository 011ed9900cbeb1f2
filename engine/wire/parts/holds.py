"""Holds: what a request asks to keep in the prefix cache, and what an engine keeps."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from engine.wire.messages import Command, Question
from engine.wire.part_record import PartRecord
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.remote_request import Peer

HoldEnd = Literal["expired", "released", "cleared", "invalid", "lost"]
# cleared: the prefix cache was emptied. invalid: the numbers in its blocks may not be finite. lost: a tier lost a
# block.


class HoldMark(msgspec.Struct, frozen=True, array_like=True):
    """Asks to keep the first `tokens` tokens of a prompt for `ttl_s` seconds after their last use."""

    tokens: int
    ttl_s: float
    left_s: float | None = None
    """Seconds until its first end, if another engine has kept them for a part of the time; None for `ttl_s`."""


class PromptHold(PartRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The holds that one request asks for."""

    part: ClassVar[str] = "holds"
    is_hint: ClassVar[bool] = True

    marks: list[HoldMark]
    """In ascending order."""
    response_id: str = ""
    """Id of the response, by which the holds can be released."""
    name: str = ""
    """Name that the client gives to its conversation; the holds can be released by it too."""


class HoldStats(PartRecord, frozen=True, kw_only=True):
    """The holds of one engine, and totals since its start."""

    part: ClassVar[str] = "holds"

    holds: int = 0
    clients: int = 0
    """Clients that have holds."""
    blocks: int = 0
    """Blocks of the first KV cache group that are kept, on the device or in a tier."""
    device_blocks: int = 0
    """Of these, blocks on the device."""
    max_blocks: int | None = None
    """Limit of blocks of this group that holds keep; None with tiers, of which a share is the limit."""
    granted: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Refused holds by HoldRefusal."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Ended holds by HoldEnd."""
    unused_block_s: float = 0.0
    """Blocks of the first KV cache group on the device times the seconds for which holds kept them that no later
    request has used."""


class GiveHolds(Question, frozen=True):
    """Ask for up to `limit` holds that no GiveHolds has returned since their last use, those that last longest first.
    Answered by HeldPrompts. The holds stay here as well."""

    limit: int


class ReleaseHolds(Command, frozen=True):
    """End the holds that have this name, or are of the response with this id."""

    name: str
    client: str | None = None
    """Client whose holds end; None for those of all clients."""


class HeldPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that an engine holds for a client, in full blocks. Another engine can take over the hold."""

    token_ids: list[int]
    cache_salt: str
    adapter: ModelAdapter | None
    client: str
    name: str
    response_id: str
    ttl_s: float
    left_s: float
    """Seconds until the end of the hold."""


class HeldPrompts(msgspec.Struct, frozen=True):
    """Answers GiveHolds."""

    peer: Peer | None
    """The engine itself, if others can fetch blocks from it."""
    prompts: list[HeldPrompt]

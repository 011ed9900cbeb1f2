"""Holds: what a request asks to keep in the prefix cache, and what an engine keeps."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from engine.wire.parts.part_record import PartRecord

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
    restored: int = 0
    """Holds of an earlier start that were found on disk or in the store."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Refused holds by HoldRefusal."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Ended holds by HoldEnd."""
    unused_block_s: float = 0.0
    """Blocks of the first KV cache group on the device times the seconds for which holds kept them that no later
    request has used."""

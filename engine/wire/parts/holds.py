"""What a request asks to hold in the prefix cache."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.parts.part_record import PartRecord


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

"""Pipeline stages."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.part_record import PartRecord


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline stage since its start, while its engine had steps under way."""

    layers: int
    ranks: int
    busy_s: float
    """Seconds in which it computed."""
    wait_s: float
    """Seconds in which it did not: it waited for hidden states, for a step, or for its link."""


class StageReport(PartRecord, frozen=True):
    """The stages of one engine."""

    part: ClassVar[str] = "stages"

    stages: list[StageStats]
    """In order."""

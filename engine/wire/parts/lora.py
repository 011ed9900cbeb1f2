"""Adapters of requests."""

from __future__ import annotations

from typing import ClassVar

from engine.wire.parts.part_record import PartRecord


class AdapterStats(PartRecord, frozen=True):
    """The adapters of one engine."""

    part: ClassVar[str] = "lora"

    max_loras: int
    """Slots for adapters."""
    resident: list[str]
    """Digests of the adapters in slots."""
    running: list[str]
    """Names of the adapters of running requests, in order."""
    waiting: list[str]

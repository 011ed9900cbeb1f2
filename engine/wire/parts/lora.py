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


class SequenceAdapter(PartRecord, frozen=True, array_like=True):
    """The adapter of a sequence."""

    part: ClassVar[str] = "lora"

    slot: int

    def decided(self) -> tuple[int, ...]:
        return (self.slot,)

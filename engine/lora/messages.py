"""Low-rank adapters (LoRA, arXiv:2106.09685) of an engine."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.messages import Question
from engine.wire.part_record import PartRecord
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.token_delta import ErrorInfo


class AdapterLoad(PartRecord, frozen=True, array_like=True):
    """Asks each rank to read an adapter into host memory, and to copy it into a slot that no sequence uses."""

    part: ClassVar[str] = "lora"

    number: int
    """Counts from 1; answers name it."""
    lora: ModelAdapter
    slot: int = -1
    """Slot to fill; -1 to read the adapter into host memory only."""


class AdapterAnswer(PartRecord, frozen=True, array_like=True):
    """The result of an AdapterLoad on one rank."""

    part: ClassVar[str] = "lora"

    number: int
    error: str = ""
    """Why it failed; empty if it succeeded."""


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


class LoadAdapter(Question, frozen=True):
    """Check that an adapter fits the model, and read its weights into host memory on every rank. Answered by
    AdapterLoaded."""

    lora: ModelAdapter


class AdapterLoaded(msgspec.Struct, frozen=True):
    """Answers LoadAdapter."""

    error: ErrorInfo | None = None
    """Why no request can be computed with the adapter."""

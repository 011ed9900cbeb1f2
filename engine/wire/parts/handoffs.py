"""Handoffs of one engine, besides those of its channel (wire/stats/handoff_stats.py)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.parts.part_record import PartRecord


class HandoffTotals(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "handoffs"

    prefill_decisions: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """Where prompts were sent to be computed, and why: {"local": {"short_prompt": 3}, "remote": ...}."""
    moves: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that moved, by outcome: `received` or `failed` in the engine that continues; `released`, `cancelled` or
    `expired` in the engine that has stopped."""

"""Costs of requests."""

from __future__ import annotations

from typing import ClassVar

from engine.wire.part_record import PartRecord


class ReportCost(PartRecord, frozen=True):
    """Asks that every delta tells the cost so far, and not only the last one."""

    part: ClassVar[str] = "costs"
    is_hint: ClassVar[bool] = True

"""Sees what a step loop spends its time on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.output import Event
from engine.core.request import Request
from engine.wire.part_record import PartRecord
from engine.wire.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended and is about to be recorded. Times are seconds on the engine's clock."""

    plan: StepPlan
    requests: list[Request]
    """Those of the plan's entries."""
    result: StepResult
    began_at: float
    ended_at: float


class LoopObserver:
    """Sees the steps of one engine. Used by the thread of the step loop."""

    def rested(self, until: float, *, stalled: bool) -> None:
        """Nothing could be computed until then. stalled: whether there were requests."""

    def stepped(self, step: EndedStep) -> None:
        """A step has ended."""

    def report(self, events: list[Event]) -> list[Event]:
        """Return the events for clients, with what this observer adds to them."""
        return events

    def stats(self) -> dict[str, Any]:
        """Return fields of EngineStats."""
        return {}

    def record(self) -> PartRecord | None:
        """Return its figures for `EngineStats.parts`."""
        return None

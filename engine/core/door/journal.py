"""What a scheduler and its step loop tell of themselves while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.door.inputs import Input
    from engine.core.output import Event
    from engine.core.request import Request
    from engine.wire.plan import StepPlan, StepResult
    from engine.wire.token_delta import FinishReason


class Journal:
    """Hears what a scheduler is given, and what it decides. This one forgets it; a Tape keeps it."""

    def entering(self, given: Input) -> None:
        """An input comes, and changes nothing yet."""

    def given(self, given: Input, now: float) -> None:
        """An input has had its effect."""

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """A step was planned, or nothing could be."""

    def failed(self, now: float) -> None:
        """No step was planned, because of an error that the scheduler raises."""

    def committed(
        self,
        step: tuple[StepPlan, list[Request]],
        result: StepResult,
        now: float,
        step_s: float,
        events: list[Event],
    ) -> None:
        """A step was recorded. step: as in Scheduler.planned. events: what came of it before an error, if there was
        one."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request has ended, by the input or step that is under way."""

    def settle(self) -> None:
        """There is time for what was put off: a step computes."""

    def take(self) -> bytes:
        """Return what has been kept; nothing if it could not be."""
        return b""

    def keep(self, error: Exception) -> None:
        """Write down what has been kept, because the step loop has failed."""

    def close(self) -> None:
        """The engine ends as it should."""


NOBODY_LISTENS = Journal()

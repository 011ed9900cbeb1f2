"""What an engine of one rank has in place of a PlanBroadcaster."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from engine.wire.part_record import PartRecord
from engine.wire.plan import StepPlan, StepResult

R = TypeVar("R", bound=PartRecord)
T = TypeVar("T")


class NoBroadcaster:
    """Stand-in for PlanBroadcaster in an engine of one rank."""

    def send(self, plan: StepPlan) -> None:
        pass

    def command(self, command: PartRecord) -> None:
        pass

    def take_answers(self, kind: type[R]) -> list[R]:
        return []

    def committed(self, result: StepResult) -> None:
        pass

    def check(self) -> None:
        pass

    def result(self, step: Future[T]) -> T:
        return step.result()

    def close(self) -> None:
        pass

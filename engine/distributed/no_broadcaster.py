"""What an engine of one rank has in place of a PlanBroadcaster."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from engine.wire.kv_offload import TierAnswer, TierCommand
from engine.wire.lora import AdapterAnswer, AdapterLoad
from engine.wire.plan import ExpertAnswer, StepPlan, StepResult

A = TypeVar("A", AdapterAnswer, TierAnswer, ExpertAnswer)
T = TypeVar("T")


class NoBroadcaster:
    """Stand-in for PlanBroadcaster in an engine of one rank."""

    def send(self, plan: StepPlan) -> None:
        pass

    def command(self, command: AdapterLoad | TierCommand) -> None:
        pass

    def take_answers(self, kind: type[A]) -> list[A]:
        return []

    def committed(self, result: StepResult) -> None:
        pass

    def check(self) -> None:
        pass

    def result(self, step: Future[T]) -> T:
        return step.result()

    def close(self) -> None:
        pass

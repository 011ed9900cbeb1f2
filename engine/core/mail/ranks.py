"""The ranks that compute an engine's steps, as its step loop on rank 0 sees them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from engine.distributed.no_broadcaster import NoBroadcaster
from engine.distributed.tp_group import TPGroup
from engine.runner.launcher import Launcher
from engine.runner.model_runner import ModelRunner
from engine.runner.step import LaunchedStep
from engine.wire.part_record import PartRecord, Records, encoded
from engine.wire.plan import StepPlan, StepResult

if TYPE_CHECKING:  # it needs pyzmq, which an engine of one rank without handoffs does without
    from engine.distributed.plan_broadcast import PlanBroadcaster


class PlanMarks(Protocol):
    """What else the ranks are told with each plan."""

    def mark(self, plan: StepPlan) -> StepPlan:
        """Return the plan with that."""

    def report(self) -> PartRecord | None:
        """Return its figures for EngineStats."""


class Ranks:
    """Launches steps on all ranks, and collects their results in the same order."""

    def __init__(
        self,
        group: TPGroup,
        *,
        runner: ModelRunner,
        launcher: Launcher,
        broadcaster: PlanBroadcaster | NoBroadcaster,
        marks: list[PlanMarks],
    ):
        """runner, launcher: of this rank."""
        self.runner, self.launcher = runner, launcher
        self._group, self._broadcaster, self._marks = group, broadcaster, marks
        self._in_flight: deque[Future[LaunchedStep] | LaunchedStep] = deque()

    def check(self) -> None:
        """Raise EngineUnavailable if a rank is gone."""
        self._broadcaster.check()

    def launch(self, plan: StepPlan) -> None:
        for marks in self._marks:
            plan = marks.mark(plan)
        self._broadcaster.send(plan)
        self._in_flight.append(self.launcher.launch(self.runner.prepare(plan)))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and return its result. Raises EngineUnavailable if a rank is gone."""
        step = self._in_flight.popleft()
        return self.runner.collect(self._broadcaster.result(step) if isinstance(step, Future) else step)

    def committed(self, result: StepResult) -> None:
        """Tell the other ranks of a result that has been recorded, if they need it."""
        self._broadcaster.committed(result)

    def drain(self) -> None:
        """Wait for the steps in flight, without their results: other ranks may still wait for what this one sends."""
        while self._in_flight:
            if isinstance(step := self._in_flight.popleft(), Future):
                self._broadcaster.result(step)

    def report(self) -> Records:
        """Return what the ends of parts on this rank report."""
        ends = *(marks.report() for marks in self._marks), self.launcher.report()
        return encoded(*ends, *(report() for report in self.runner.parts.report))

    def close(self) -> None:
        """Stop this rank's thread, and let the other ranks end."""
        self.launcher.close()
        self._broadcaster.close()
        self.runner.close()
        self._group.close()

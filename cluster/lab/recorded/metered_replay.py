"""A replay that also measures what the time on the tape was spent on."""

from __future__ import annotations

from collections import deque

from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.tape.replay import Moment, Replay
from deployments.billing.prices import Prices
from engine.core.output import Event
from engine.costs.step_cost import StepTimes, StepWork
from engine.options.stages import StageOptions
from engine.parts.tape.engine_tape import EngineTape
from engine.wire.token_delta import TokenDelta


class MeteredReplay(Replay):
    """Replays forwards only: `go_to` must not go back."""

    def __init__(self, tape: EngineTape):
        """Raises UnknownState."""
        super().__init__(tape)
        kv_cache, ranks = self.scheduler.kv_cache, self.scheduler.config.of(StageOptions).num_ranks
        sizes = [manager.pool.block_bytes * ranks for manager in kv_cache.groups]
        self._times = StepTimes()  # those of the scheduler know no seconds, unless its decisions depend on them
        self.meter = EngineMeter(self._times, kv_cache, sizes, tape.segments[0].started_at)
        self._planned_at: deque[float] = deque()  # of the steps under way, oldest first
        self._ended_at = tape.segments[0].started_at
        self.requests = self.prompt_tokens = self.output_tokens = 0  # of the engine's own requests that have ended

    @property
    def seconds(self) -> float:
        """Length of the tape."""
        last = self.moments[-1].at if self.moments else self.tape.segments[0].started_at
        return last - self.tape.segments[0].started_at

    def step(self) -> Moment:
        moment = self.moments[self.position]
        if moment.digest is not None:
            self.meter.resume(moment.at)
        elif moment.commits and self.scheduler.planned:
            self._charge(moment)
        super().step()
        if moment.digest is not None and len(self._planned_at) < len(self.scheduler.planned):
            self._planned_at.append(moment.at)
        if moment.digest is not None and not self.scheduler.planned:
            self.meter.rest("stalled" if self.scheduler.has_work else "idle")
        for request, reason in self._ends:
            last = TokenDelta(request_id=request.request_id, finish_reason=reason)  # type: ignore[arg-type]
            self.meter.report([Event(request, last)])
            if not request.asked_by:
                self.requests += 1
                self.prompt_tokens += request.num_prompt
                self.output_tokens += request.num_output
        return moment

    def _charge(self, moment: Moment) -> None:
        """Charge a step that ends. It began when it had been planned, and the one before had ended."""
        plan, requests = self.scheduler.planned[0]
        planned_at = self._planned_at.popleft() if self._planned_at else self._ended_at
        began_at, self._ended_at = max(planned_at, self._ended_at), moment.at
        self._times.observe_step(StepWork.of(plan), moment.at - began_at)
        self.meter.step(plan, requests, began_at, moment.at)

    def costs(self, prices: Prices) -> Costs | None:
        """Return what the engine has cost in the time that was replayed; None for a tape without any."""
        if not self.seconds:
            return None
        return Costs.of(
            prices,
            [self.meter],
            engine_s=self.seconds,
            seconds=self.seconds,
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )

"""The step loop of one engine: plan, compute, record."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from engine.clock import SYSTEM_CLOCK, Clock
from engine.core.door import inputs
from engine.core.door.journal import NOBODY_LISTENS, Journal
from engine.core.engine_stats import stats_of
from engine.core.loop_observer import EndedStep, LoopObserver
from engine.core.mail.mail import Mail
from engine.core.mail.ranks import Ranks
from engine.core.output import Event
from engine.core.scheduler import Scheduler
from engine.engine_options import EngineOptions
from engine.errors import EngineUnavailable
from engine.hooks import ByClass, overriding
from engine.model.config import ModelConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import encoded
from engine.wire.plan import StepPlan
from engine.wire.stats.engine_stats import EngineStats

logger = logging.getLogger(__name__)

POLL_S = 0.005  # while every request waits for something that is on its way


class EngineCore:
    """Scheduler and runner of one engine, without sockets.

    With overlap, step n+1 is planned and prepared while step n computes. On a CPU the model runs in its own thread; a
    GPU runs in parallel to the host anyway, and step n+1 is in its queue before step n ends. Without overlap, nothing
    happens in parallel. The tokens are the same with and without overlap.
    """

    def __init__(
        self,
        config: EngineOptions,
        model_config: ModelConfig,
        *,
        ranks: Ranks,
        scheduler: Scheduler,
        mail: Mail,
        observers: Sequence[LoopObserver] = (),
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal = NOBODY_LISTENS,
    ):
        self._now = clock.monotonic
        self.journal = journal
        self.config, self.model_config = config, model_config
        self.ranks, self.scheduler, self.mail, self.observers = ranks, scheduler, mail, ByClass(observers)
        self._rested = overriding(observers, LoopObserver.rested)
        self._stepped = overriding(observers, LoopObserver.stepped)
        self._report = overriding(observers, LoopObserver.report)
        self.max_model_len = scheduler.limits.max_model_len
        #: True if the last step had nothing to compute; nor will the next until a command comes or `wake` is called.
        self.idle = True
        self.last_step_at = self._now()
        self._broken: str | None = None
        self._submitted_at: deque[float] = deque()  # of the steps in flight
        self._stalled = False  # whether there were requests when it became idle

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, message: GenerateRequest) -> None:
        """Take a request, or raise a ServingError."""
        self.admit(inputs.Added(message))

    def check(self, message: GenerateRequest) -> None:
        """Raise RequestError if `add` would refuse this request even if there were no others, or if it would end for
        what it refers to. Waits for that."""
        self.scheduler.check_request(message)
        self.mail.check(message, self._now())

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> list[Event]:
        """End a request if it is live, and return its final event. reason: "stop" if the request's text has reached a
        stop string."""
        self.apply(inputs.Aborted(request_id, reason))
        return self.take_events()

    def admit(self, given: inputs.Input) -> None:
        """Take an input that brings a new request, and ask for what it needs. Raises ServingError."""
        now = self._now()
        self.scheduler.apply(given, now)
        self.mail.deliver()
        if self.idle:
            self.idle, self.last_step_at = False, now
            self._tell_rest(now)

    def apply(self, given: inputs.Input) -> Any:
        """Pass an input on to the scheduler, whose answer it returns."""
        return self.scheduler.apply(given, self._now())

    def take_events(self) -> list[Event]:
        """Return what requests have got since the last call."""
        events = self.scheduler.out.take_events()
        for report in self._report:
            events = report(events)
        return events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- the loop ------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan a step, then finish the previous step (with overlap) or this one (without).

        If a step raises, the engine is unusable afterwards, since it is unknown what the requests have computed.
        """
        if self._broken is not None:
            raise EngineUnavailable(f"an earlier step failed: {self._broken}")
        try:
            if self.ranks.runner.overlap:
                self._overlapped_step()
            else:
                self._plain_step()
            self.mail.step_ended()
            return self.take_events()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            self.journal.keep(error)
            raise

    def _plain_step(self) -> None:
        if (plan := self._plan()) is not None:
            self._launch(plan)
            self._finish_step()
        elif not self.scheduler.out.events:
            self._wait()

    def _overlapped_step(self) -> None:
        if (plan := self._plan()) is not None:
            self._launch(plan)
            if len(self._submitted_at) < self.ranks.runner.max_steps:
                return  # there may be more to plan while it computes
        if self._submitted_at:
            self._finish_step()
        elif not self.scheduler.out.events:
            self._wait()

    def _plan(self) -> StepPlan | None:
        self.ranks.check()
        now = self._now()
        if self.idle:
            self._tell_rest(now)
        self.idle = False
        for given in self.mail.arrived(now):
            self.scheduler.apply(given, now)
        plan = self.scheduler.schedule(now)
        self.mail.deliver()
        return plan

    def _launch(self, plan: StepPlan) -> None:
        self._submitted_at.append(self._now())
        self.ranks.launch(plan)

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight, and record its result."""
        submitted_at = self._submitted_at.popleft()
        self.journal.settle()  # while the step computes
        result = self.ranks.collect()
        began_at = max(self.last_step_at, 0.0 if result.drafts_first else submitted_at)
        self.last_step_at = self._now()
        ended = EndedStep(*self.scheduler.planned[0], result, began_at, self.last_step_at)
        for stepped in self._stepped:
            stepped(ended)
        self.scheduler.commit(result, self.last_step_at, self.last_step_at - began_at)
        self.mail.deliver()
        self.ranks.committed(result)

    def _wait(self) -> None:
        """Wait briefly if something is on its way that a request needs; otherwise become idle. Called when no step can
        be planned."""
        self.ranks.launcher.rest()
        if self.mail.is_awaited:
            self.mail.wait(POLL_S)
        else:
            self.idle = True
        self.last_step_at = self._now()  # no step is late
        self._stalled = self.has_work
        self._tell_rest(self.last_step_at)

    def _tell_rest(self, until: float) -> None:
        for rested in self._rested:
            rested(until, stalled=self._stalled)

    # -- state ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        stats, fields = stats_of(self.scheduler), dict[str, Any]()
        for observer in self.observers.all:
            fields |= observer.stats()
        records = encoded(*(observer.record() for observer in self.observers.all))
        return msgspec.structs.replace(stats, **fields, parts=stats.parts | records | self.ranks.report())

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last step ended; 0 when there is nothing to compute."""
        return self._now() - self.last_step_at if self.has_work and not self.idle else 0.0

    def close(self) -> None:
        """Wait for the steps in flight, stop the thread, and let the other ranks end."""
        with suppress(EngineUnavailable):  # a rank may be gone
            if self._broken is None and not self._submitted_at:
                self.mail.flush(self._now)
            if self._broken is None:
                self.ranks.drain()
        if self._broken is None:
            self.journal.close()
        self.mail.close()  # before the other ranks end: they may be reading
        self.ranks.close()

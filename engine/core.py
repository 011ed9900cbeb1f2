"""The step loop of one engine: plan, compute, record."""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable, RequestTimeout
from engine.lockstep import Leader
from engine.messages import EngineStats, GenerateRequest
from engine.model_config import ModelConfig
from engine.model_folder import resolve
from engine.plan import StepPlan, StepResult
from engine.request import Request, State
from engine.runner import ModelRunner
from engine.scheduler import Event, Scheduler
from engine.tp_group import TPGroup

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often a step that takes long is asked whether all ranks are there


class EngineCore:
    """Scheduler and runner of one engine, without any socket.

    With `overlap` the model computes in a thread of its own, and step n+1 is planned and prepared while step n
    computes; without, everything happens in turn. Both give the same tokens.
    """

    def __init__(self, config: EngineConfig, group: TPGroup | None = None):
        """group: of `config.tensor_parallel` ranks, joined; this is its rank 0. Raises StartupError."""
        self.config = config
        self._group = group or TPGroup.single()
        if self._group.size != config.tensor_parallel:
            raise ConfigError("tensor_parallel", config.tensor_parallel, f"the size of the group ({self._group.size})")
        with self._group.starting():
            folder = resolve(config.model)
            self.model_config = ModelConfig.from_folder(folder)
            self.runner = ModelRunner(config, self.model_config, folder, self._group)
            self._lockstep = Leader(self._group) if self._group.size > 1 else None
        self.max_model_len = self.runner.max_model_len
        self.scheduler = Scheduler(
            config,
            BlockPool(self.runner.num_blocks, config.block_size, config.enable_prefix_caching),
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=frozenset(self.model_config.eos_token_ids),
        )
        self._in_flight: deque[Future[StepResult]] = deque()
        # with other ranks also without overlap, so that one that hangs can be noticed while a step waits for it
        threaded = self.runner.overlap or self._lockstep is not None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model") if threaded else None
        self._deadlines: list[tuple[float, int, Request]] = []  # heap of (when, number of arrival, request)
        self.last_step_at = time.monotonic()
        self._broken: str | None = None

    def add(self, message: GenerateRequest) -> None:
        """Take a request, or raise a ServingError."""
        now = time.monotonic()
        if not self.has_work:
            self.last_step_at = now
        request = self.scheduler.add(message, now)
        if message.timeout_s is not None:
            heapq.heappush(self._deadlines, (now + message.timeout_s, request.order[1], request))

    def check(self, message: GenerateRequest) -> None:
        """Raise RequestError if `add` would refuse this request whatever the load."""
        self.scheduler.check_request(message)

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> Event | None:
        """End a request, if it is live; with `stop` its text has reached a stop string."""
        return self.scheduler.abort(request_id, time.monotonic(), reason=reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Plan a step, and finish the one before it (with overlap) or this one (without).

        A step that raises leaves the engine without use: what its requests have computed is not known.
        """
        if self._broken is not None:
            raise EngineUnavailable(f"an earlier step failed: {self._broken}")
        try:
            return self._step()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _step(self) -> list[Event]:
        if self._lockstep:
            self._lockstep.check()
        events = self._expire()
        plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            self._submit(plan)
            if self.runner.overlap and len(self._in_flight) == 1:
                return events  # there may be more to plan while it computes
        if self._in_flight:
            result = self._result(self._in_flight.popleft())
            self.last_step_at = time.monotonic()
            events += self.scheduler.commit(result, self.last_step_at)
            if self._lockstep:
                self._lockstep.committed(result)
        return events

    def _result(self, step: Future[StepResult]) -> StepResult:
        """Raises EngineUnavailable if a rank dies meanwhile, or falls silent."""
        while self._lockstep and not wait([step], LOOK_S).done:
            self._lockstep.check()
        return step.result()

    def _submit(self, plan: StepPlan) -> None:
        if self._lockstep:
            self._lockstep.send(plan)
        inputs = self.runner.prepare(plan)
        if self._executor:
            self._in_flight.append(self._executor.submit(self.runner.execute, inputs))
        else:
            done: Future[StepResult] = Future()
            done.set_result(self.runner.execute(inputs))
            self._in_flight.append(done)

    def _expire(self) -> list[Event]:
        """End requests whose deadline has passed."""
        now = time.monotonic()
        events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            when, _, request = heapq.heappop(self._deadlines)
            if request.state is not State.FINISHED:
                error = RequestTimeout(request.request_id, when - request.arrived_at)
                event = self.scheduler.abort(request.request_id, now, error)
                assert event is not None, "a request that is not finished is live"
                events.append(event)
        return events

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last step ended; 0 when there is nothing to do."""
        return time.monotonic() - self.last_step_at if self.has_work else 0.0

    def close(self) -> None:
        """Wait for the step that is computing, stop the thread, and let the other ranks end."""
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if self._lockstep:
            self._lockstep.close()
        self._group.close()

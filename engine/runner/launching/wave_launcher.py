"""Launches the steps of an engine that shares experts with others, in steps that all engines take together.

A wave is a series of such steps. An engine with a step to launch starts a wave, and wakes the others. In each step of
the wave, an engine launches its own step, or computes only its experts for the tokens of the others. The wave ends when
no engine has a step; then all threads sleep. So an engine without requests computes no dummy step, and its scheduler
knows nothing of the others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from engine.distributed.data_parallel_group import DataParallelGroup, Wave
from engine.errors import EngineUnavailable
from engine.model.layers.moe import Experts
from engine.runner.inputs import StepInputs
from engine.runner.launching.launcher import Launcher
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.wire.messages import SharedSteps

logger = logging.getLogger(__name__)

LATE_S = 0.05  # that the other engines wait for the next step of an engine which has just taken one
END_S = 5.0  # for the thread to end


@dataclass(frozen=True, slots=True)
class Job:
    """A step to be launched."""

    inputs: StepInputs
    launched: Future[LaunchedStep]

    @property
    def num_rows(self) -> int:
        assert self.inputs.batch is not None, "this step runs as a graph"
        return len(self.inputs.batch.positions)


@dataclass(frozen=True, slots=True)
class Rest:
    """Says that there is no step to launch until the next job."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread."""


class WaveLauncher(Launcher):
    """A Launcher with a thread that also serves other engines."""

    def __init__(self, runner: ModelRunner, group: DataParallelGroup):
        super().__init__(runner)
        assert group.expert_exchange is not None
        self._exchange, self._waves = group.expert_exchange, group.waves
        self._experts = [layer for layer in runner.model.modules() if isinstance(layer, Experts)]
        self._queue: queue.SimpleQueue[Job | Rest | Stop | Wave] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._broken: str | None = None  # guarded by the lock, so that no job comes after the thread's end
        self._number = 0  # of the current or next wave
        self._rests = True  # whether the others need not wait for this engine's next step
        self._stopping = False
        self._num_own = self._num_served = 0  # steps
        self._wait_s = 0.0
        self._waves.listen(self._queue.put)
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def launch(self, inputs: StepInputs) -> Future[LaunchedStep]:
        job = Job(inputs, Future())
        with self._lock:
            if self._broken is not None:
                raise EngineUnavailable(self._broken)
            self._queue.put(job)
        return job.launched

    def rest(self) -> None:
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        self._queue.put(Rest())

    def shared(self) -> SharedSteps:
        return SharedSteps(steps={"own": self._num_own, "served": self._num_served}, wait_s=self._wait_s)

    def close(self) -> None:
        self._queue.put(Stop())
        self._thread.join(END_S)

    def _run(self) -> None:
        job: Job | None = None
        try:
            self._runner.device.set_current()
            while not self._stopping:
                job = self._await_wave()
                while not self._stopping and self._begin(job):
                    self._take_part(job)
                    job = self._next_job()
                self._number += 1
        except BaseException as error:  # noqa: BLE001 - raised again by `launch` and `rest`
            self._fail(error, job)
        else:
            self._fail(EngineUnavailable("the engine has ended"), job)

    def _await_wave(self) -> Job | None:
        """Sleep until there is something to launch, or another engine starts a wave. Returns the job, if any."""
        while True:
            match self._queue.get():
                case Job() as job:
                    self._waves.start(self._number)
                    return job
                case Wave(number) if number == self._number:
                    return None
                case Stop():
                    self._stopping = True
                    return None

    def _next_job(self) -> Job | None:
        """Return the next step to launch, if there is one. After a step of this engine, wait until there is another, or
        the engine says that there is none, but not for long."""
        wait_s = 0.0 if self._rests else LATE_S
        while True:
            try:
                item = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                self._rests = True
                return None
            match item:
                case Job():
                    return item
                case Rest():
                    self._rests, wait_s = True, 0.0
                case Stop():
                    self._stopping = True
                    return None

    def _begin(self, job: Job | None) -> bool:
        """Tell the other engines what this one has. Returns whether any engine has a step."""
        started = time.monotonic()
        any_has_one = self._exchange.begin(None if job is None else job.num_rows)
        self._wait_s += time.monotonic() - started
        return any_has_one

    @torch.inference_mode()
    def _take_part(self, job: Job | None) -> None:
        """Take a step of the wave: launch the job, or serve the other engines."""
        if job is None:
            self._num_served += 1
            for experts in self._experts:
                experts.serve()
            return
        self._num_own += 1
        self._rests = False
        job.launched.set_result(self._runner.launch(job.inputs))

    def _fail(self, error: BaseException, job: Job | None) -> None:
        """Refuse all jobs from now on."""
        with self._lock:
            self._broken = str(error) or type(error).__name__
        jobs = [job] if job is not None and not job.launched.done() else []
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):
                jobs.append(item)
        for waiting in jobs:
            waiting.launched.set_exception(error)

"""Launches the steps of an engine that shares experts with others, in steps that all engines take together.

A wave is a series of such steps. An engine with a step to launch starts a wave, and wakes the others. In each step of
the wave, an engine launches its own step, or computes only its experts for the tokens of the others. The wave ends when
no engine has a step; then all threads sleep. So an engine without requests computes no dummy step, and its scheduler
knows nothing of the others. The first rank of an engine decides, and its other ranks do the same. An engine that ends
serves the others until the wave is over. If an engine is lost, all others end too.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.waves import Lost, Message, Wave
from engine.distributed.exchange.expert_exchange import StepSize
from engine.distributed.process_group import COLLECTIVE_TIMEOUT_S
from engine.eplb.rank_experts import NoExperts
from engine.errors import EngineUnavailable
from engine.model.layers import moe
from engine.model.models.llama import Model
from engine.runner.graphs.cuda_graphs import NoGraphs, StepShape
from engine.runner.graphs.gpu_layers import GPUStep
from engine.runner.graphs.shared_graphs import SharedGraphs
from engine.runner.launcher import Launcher, StepRunner
from engine.runner.step import LaunchedStep, StepInputs
from engine.wire.parts.experts import SharedSteps

logger = logging.getLogger(__name__)

LATE_S = 0.05  # that the other engines wait for the next step of an engine which has just taken one
STAGE_LATE_S = 0.002  # the same in a pipeline stage: its next step may need that of another stage, which waits for them
END_S = 5.0  # for the thread to end


@dataclass(frozen=True, slots=True)
class Job:
    """A step to be launched."""

    inputs: StepInputs
    launched: Future[LaunchedStep]

    @property
    def size(self) -> StepSize:
        inputs, prepared = self.inputs, self.inputs.prepared
        if isinstance(prepared, GPUStep) and prepared.unpadded is not None:
            return StepSize(*prepared.unpadded.size)
        return StepSize(len(inputs.token_index))

    def as_graph(self, shape: StepShape) -> StepInputs:
        """Return the inputs of the step for a graph of this shape."""
        assert isinstance(self.inputs.prepared, GPUStep)
        return replace(self.inputs, prepared=self.inputs.prepared.as_graph(shape, self.inputs.staged))


@dataclass(frozen=True, slots=True)
class Rest:
    """Says that there is no step to launch until the next job."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread."""


class WaveLauncher(Launcher):
    """A Launcher with a thread that also serves other engines: that of the first rank of an engine, or of each of its
    stages."""

    def __init__(
        self,
        runner: StepRunner,
        group: DataParallelGroup,
        model: Model,
        graphs: SharedGraphs | NoGraphs,
        experts: NoExperts,
    ):
        super().__init__(runner)
        self._group, self._exchange, self._waves = group, group.expert_exchange, group.waves
        self._late_s = STAGE_LATE_S if group.has_stages else LATE_S
        self._graphs, self._rank_experts = graphs, experts
        self._layers = [layer for layer in model.modules() if isinstance(layer, moe.Experts)]
        self._queue: queue.SimpleQueue[Job | Rest | Stop | Message] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()  # taken from the queue, and not launched yet
        self._lock = threading.Lock()
        self._lost: str | None = None  # why the engines take no steps together any more
        self._broken: str | None = None  # guarded by the lock, so that no job comes after the thread's end
        self._number = 0  # of the current or next wave
        self._rests = True  # whether the others need not wait for this engine's next step
        self._stopping = False
        self._num_own = self._num_served = 0  # steps
        self._wait_s = 0.0
        self._waves.listen(self._hear)
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

    def report(self) -> SharedSteps:
        return SharedSteps(steps={"own": self._num_own, "served": self._num_served}, wait_s=self._wait_s)

    def close(self) -> None:
        self._queue.put(Stop())
        self._thread.join(END_S)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Lost):
            self._lost = message.reason
            self._group.abort(message.reason)
        self._queue.put(message)

    def _run(self) -> None:
        try:
            self._runner.device.set_current()
            while not self._stopping:
                self._take_wave()
        except BaseException as error:  # noqa: BLE001 - raised again by `launch` and `rest`
            self._fail(error)
            if not (self._stopping and isinstance(error, EngineUnavailable)):  # else another engine has ended first
                self._waves.tell(Lost(str(error) or type(error).__name__))
        else:
            self._fail(EngineUnavailable("the engine has ended"))

    def _take_wave(self) -> None:
        """Take part in a wave. Raises EngineUnavailable if an engine is lost."""
        self._await_wave()
        if self._stopping:
            return
        while self._begin():
            self._take_part()
            self._look_for_job()
        self._number += 1

    def _await_wave(self) -> None:
        """Sleep until there is something to launch, or another engine starts a wave. Raises EngineUnavailable if an
        engine is lost meanwhile."""
        while not self._stopping:
            match self._queue.get():
                case Job() as job:
                    self._jobs.append(job)
                    self._waves.tell(Wave(self._number))
                    return
                case Wave(number) if number == self._number:
                    return
                case Stop():
                    self._stopping = True
                case Lost(reason):
                    raise EngineUnavailable(reason)

    def _look_for_job(self) -> None:
        """Take the next step to launch from the queue, if there is one. After a step of this engine, wait until there
        is another, or the engine says that there is none, but not for long."""
        wait_s = 0.0 if self._rests else self._late_s
        while not self._jobs and not self._stopping:
            try:
                item = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                self._rests = True
                return
            match item:
                case Job():
                    self._jobs.append(item)
                case Rest():
                    self._rests, wait_s = True, 0.0
                case Stop():
                    self._stopping = True

    def _begin(self) -> bool:
        """Tell the other engines what this one has. Returns whether any engine has a step."""
        started, experts = time.monotonic(), self._rank_experts
        any_has_one = self._exchange.begin(self._jobs[0].size if self._jobs else None, experts.tell())
        self._wait_s += time.monotonic() - started
        if self._lost is not None:  # a GPU would compute any numbers from now on, without an error
            raise EngineUnavailable(self._lost)
        if any_has_one:
            experts.turn(self._exchange.states)
        return any_has_one

    @torch.inference_mode()
    def _take_part(self) -> None:
        """Take a step of the wave: launch a step of this engine, or serve the other engines."""
        exchange = self._exchange
        shape = self._graphs.agreed(exchange.sizes, exchange.members.engine)
        if exchange.has_step:
            self._rests, job = False, self._jobs[0]
            self._answer(self._runner.launch(job.inputs if shape is None else job.as_graph(shape)))
            return
        self._num_served += 1
        if shape is None:
            for layer in self._layers:
                layer.serve()
        else:
            self._rank_experts.begin(None, 0)
            self._graphs.run_empty(shape)

    def _answer(self, launched: LaunchedStep) -> None:
        """Take the first job away, which has been launched."""
        self._num_own += 1
        self._jobs.popleft().launched.set_result(launched)

    def _fail(self, error: BaseException) -> None:
        """Refuse all jobs from now on."""
        with self._lock:
            self._broken = str(error) or type(error).__name__
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):
                self._jobs.append(item)
        for waiting in self._jobs:
            waiting.launched.set_exception(error)


class FollowingLauncher(WaveLauncher):
    """The launcher of another rank of an engine or stage. It takes the steps that the first rank takes, in the same
    order."""

    def _await_wave(self) -> None:
        """Sleep until an engine starts a wave."""
        while not self._stopping:
            match self._take():
                case Wave(number) if number == self._number:
                    return

    def _look_for_job(self) -> None:
        """Do nothing: `begin` tells whether there is a step."""

    def _take_part(self) -> None:
        while self._exchange.has_step and not self._jobs:
            self._take(waits=True)
            if self._stopping:
                raise EngineUnavailable("the engine has ended")
        super()._take_part()

    def _take(self, waits: bool = False) -> Rest | Message | None:
        """Take the next item from the queue, and return it unless it is a job. waits: whether the first rank has
        launched a step that is still to come. Raises EngineUnavailable if a step or wave is not there in time, or an
        engine is lost meanwhile."""
        try:
            item = self._queue.get(timeout=COLLECTIVE_TIMEOUT_S if waits or self._jobs else None)
        except queue.Empty:
            late = f"has not gone on with a step for {COLLECTIVE_TIMEOUT_S:.0f} s"
            raise EngineUnavailable(f"the first rank of this engine {late}") from None
        match item:
            case Job():
                self._jobs.append(item)
                return None
            case Stop():
                self._stopping = True
                return None
            case Lost(reason):
                raise EngineUnavailable(reason)
        return item

"""The cost of steps of a real engine, by running it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from cluster.cli.bench.prompts import random_ids
from cluster.simulator.cost_model import Work
from engine.core.engine import EngineCore
from engine.core.scheduler import Event
from engine.wire.messages import GenerateRequest
from engine.wire.plan import StepPlan
from engine.wire.sampling_params import SamplingParams

BATCHES = (1, 3, 8, 20, 48)
PROMPTS = (32, 200, 800)
OUTPUT = 24
Clock = Callable[[], float]
UNMEASURED = 4  # steps at the start, which compile kernels and touch memory for the first time


class StepRecorder:
    """What each step of an engine without overlap computed, and how long it took, while this is entered: methods are
    wrapped on the one object. The time is the whole turn of the loop, with planning, since requests wait for it all."""

    def __init__(self, core: EngineCore, clock: Clock):
        self.works: list[Work] = []
        self.seconds: list[float] = []
        self._core, self._clock = core, clock
        self._schedule, self._step = core.scheduler.schedule, core.step
        self._work: Work | None = None

    def __enter__(self) -> StepRecorder:
        self._core.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self._core.step = self.step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._core.step, self._core.scheduler.schedule  # what hid the methods of the class

    def schedule(self, now: float) -> StepPlan | None:
        plan = self._schedule(now)
        self._work = None if plan is None else Work.of(plan)
        return plan

    def step(self) -> list[Event]:
        started = self._clock()
        events = self._step()
        if self._work is not None:
            self.works.append(self._work)
            self.seconds.append(self._clock() - started)
        return events


def measure_steps(
    core: EngineCore, *, seed: int = 0, clock: Clock = time.perf_counter, progress: Callable[[], None] = lambda: None
) -> tuple[list[Work], list[float]]:
    """Runs batches of several sizes and prompt lengths, all prompts at once, so that prompts, decoding and both in one
    step occur. Returns what each step computed and its seconds by `clock`. progress: is called after each batch."""
    rng, recorder = random.Random(seed), StepRecorder(core, clock)
    vocab_size = core.model_config.vocab_size
    capacity = core.scheduler.pool.num_blocks * core.scheduler.pool.block_size
    for batch in BATCHES:
        for length in PROMPTS:
            length = min(length, core.max_model_len - OUTPUT - 1)
            if batch > core.config.max_num_seqs or batch * (length + OUTPUT) > capacity:
                continue
            for i in range(batch):
                # not all of one length, so that some end, and others start, while the rest goes on
                prompt = random_ids(rng, rng.randint(max(1, length // 2), length), vocab_size)
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(OUTPUT // 2, OUTPUT))
                core.add(GenerateRequest(request_id=f"{batch}-{length}-{i}-{seed}", prompt=prompt, params=params))
            with recorder:
                while core.has_work:
                    core.step()
            progress()
    return recorder.works[UNMEASURED:], recorder.seconds[UNMEASURED:]

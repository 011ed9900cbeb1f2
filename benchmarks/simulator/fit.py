"""Measures the steps of a real engine by running it, and fits a cost model to them.

python -m benchmarks.simulator.fit --model pocket --output cost.json

`manta simulate --cost cost.json` uses the result. Another program on the machine spoils it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import DtypeOption, JsonOption, ModelOption, print_json, run
from cluster.cli.bench.prompts import random_ids
from cluster.lab.recorded.cost_fit import fit_cost
from cluster.lab.simulator.cost_model import Layers, Work
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.wire.generate_request import GenerateRequest
from engine.wire.plan import StepPlan
from engine.wire.sampling_params import SamplingParams

BATCHES = (1, 3, 8, 20, 48)
PROMPTS = (32, 200, 800)
OUTPUT = 24
Clock = Callable[[], float]
NOISY = 0.3  # median error from which a fit is good for nothing
UNMEASURED = 4  # steps at the start, which compile kernels and touch memory for the first time


class StepRecorder:
    """Records the work and the time of each step of an engine without overlap, while this is entered.

    Methods are wrapped on the one object. The time is the whole turn of the loop, with planning: requests wait for it.
    """

    def __init__(self, core: EngineCore, clock: Clock):
        self.works: list[Work] = []
        self.seconds: list[float] = []
        self._core, self._clock = core, clock
        self._schedule, self._step = core.scheduler.schedule, core.step
        self._work: Work | None = None
        self._layers = Layers.of(core.model_config)

    def __enter__(self) -> StepRecorder:
        self._core.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self._core.step = self.step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._core.step, self._core.scheduler.schedule  # what hid the methods of the class

    def schedule(self, now: float) -> StepPlan | None:
        plan = self._schedule(now)
        self._work = None if plan is None else Work.of(plan, self._layers)
        return plan

    def step(self) -> list[Event]:
        started = self._clock()
        events = self._step()
        if self._work is not None:
            self.works.append(self._work)
            self.seconds.append(self._clock() - started)
        return events


def measure_steps(
    core: EngineCore, *, seed: int = 0, clock: Clock = time.perf_counter
) -> tuple[list[Work], list[float]]:
    """Run batches of several sizes and prompt lengths; return each step's work and its seconds by `clock`.

    All prompts of a batch come at once, so that prompts, decoding and both in one step occur.
    """
    rng, recorder = random.Random(seed), StepRecorder(core, clock)
    vocab_size = core.model_config.vocab_size
    capacity = core.scheduler.kv_cache.pool.num_blocks * core.scheduler.kv_cache.pool.block_size
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
    return recorder.works[UNMEASURED:], recorder.seconds[UNMEASURED:]


def main(
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for `manta simulate --cost`.")],
    model: ModelOption = "pocket",
    dtype: DtypeOption = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens that one step may compute.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at a time.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=64, help="Longest prompt + answer, in tokens.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the steps of this machine's engine."""
    config = EngineConfig(
        model=model, dtype=dtype, num_threads=threads, max_num_batched_tokens=max_num_batched_tokens,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, async_scheduling=False, enable_prefix_caching=False,
    )  # fmt: skip
    core = build_engine(config)
    try:
        found = fit_cost(*measure_steps(core))
    finally:
        core.close()
    found.write(output)
    if as_json:
        return print_json(asdict(found))
    for name, seconds in asdict(found.cost).items():
        print(f"{name:12}{1e6 * seconds:12.4f} µs")
    print(f"{found.steps} steps; error of one: median {found.error:.1%}, p90 {found.p90_error:.1%}")
    if found.error > NOISY:
        print("equal work took very unequal times: is another program using the machine? do not trust this fit")


if __name__ == "__main__":
    run(main)

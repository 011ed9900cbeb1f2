"""Time of each kernel in a step on a CPU, and how near it comes to what the machine can do.

    python -m benchmarks.kernels --model DIR --steps 1x1@200,64x1@160,1x1024@1024

A step is SEQUENCES x TOKENS @ CONTEXT: so many sequences compute so many tokens each, the last of them at that length.
Kernels run one by one, as outside a graph. With one thread, its CPU time counts, which other work on the machine
disturbs least; with several it is the time that passes. The best of the repetitions counts, for each call.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.command import JsonOption, ModelOption, print_report, run
from benchmarks.memory_floor import measure_bandwidth
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.kernel_trial.steps import memory_of
from engine.model.batch import Batch
from engine.model.ops import cpu, linear
from engine.model.ops.cpu.attention import ATTEND
from engine.model.ops.cpu.kernel import CpuKernel
from engine.model.ops.cpu.linear import MULTIPLY
from engine.runner.graphs.warm_up import SAMPLINGS, plan
from engine.runner.model_runner import ModelRunner
from engine.runner.step import Forward
from engine.wire.plan import BlockChange

REPETITIONS = 5
PEAK_REPETITIONS = 100
PEAK = 384, 768, 768  # rows, inputs and outputs of the product that is the peak: all of it stays in a core's cache


@dataclass(slots=True)
class Work:
    """The calls of a kernel in one step."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0  #: of linear layers and attention
    bytes: float = 0.0  #: of weights, of KV, or of the step's rows


@dataclass(frozen=True, slots=True)
class KernelsReport:
    model: str
    threads: int
    peak_gflops: float  #: of a product that a core's cache holds, in bfloat16
    bandwidth_gb_per_s: float
    steps: dict[str, dict[str, Work]] = field(default_factory=dict)


class Watch:
    """Takes the time of every kernel that is launched."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._launch = clock, CpuKernel.launch
        self._calls: list[tuple[str, float, float, float]] = []  # name, seconds, floating point operations, bytes
        self._pairs = self._kv_tokens = 0.0
        self._names: dict[int, str] = {}
        for module in pkgutil.walk_packages(cpu.__path__, f"{cpu.__name__}."):
            if not module.name.endswith("__main__"):
                for name, value in vars(importlib.import_module(module.name)).items():
                    if isinstance(value, CpuKernel):
                        self._names[id(value)] = name.lower()
        watch = self
        CpuKernel.launch = lambda kernel, *args: watch.timed(kernel, *args)  # type: ignore[method-assign]

    def timed(self, kernel: CpuKernel, dtype: torch.dtype, items: int, *args: Tensor | int) -> None:
        started = self._clock()
        self._launch(kernel, dtype, items, *args)
        seconds = self._clock() - started
        rows = args[0] if isinstance(args[0], Tensor) else torch.empty(0)
        name, flops = self._names[id(kernel)], 0.0
        size = float(sum(arg.nbytes for arg in args if isinstance(arg, Tensor) and len(arg) == len(rows)))
        if kernel is MULTIPLY and isinstance(args[1], Tensor):
            columns, pairs, width, _ = args[1].shape
            name, size = f"linear {2 * pairs} x {columns * width}", args[1].nbytes
            flops = 2.0 * len(rows) * args[1].numel()
        elif kernel is ATTEND and isinstance(args[1], Tensor):
            _, kv_heads, _, head_dim = args[1].shape
            flops = 4 * self._pairs * rows.shape[1] * head_dim
            size = 2 * self._kv_tokens * kv_heads * head_dim * rows.itemsize
        self._calls.append((name, seconds, flops, size))

    def measure(self, step: Callable[[], Any], counts: list[int], context: int) -> dict[str, Work]:
        self._pairs = sum(count * context - count * (count - 1) / 2 for count in counts)
        self._kv_tokens = float(len(counts) * context)
        step()
        runs = []
        for _ in range(REPETITIONS):
            self._calls = []
            step()
            runs.append(self._calls)
        found: dict[str, Work] = defaultdict(Work)
        for same in zip(*runs, strict=True):
            name, _, flops, size = same[0]
            work = found[name]
            work.calls, work.flops, work.bytes = work.calls + 1, work.flops + flops, work.bytes + size
            work.seconds += min(call[1] for call in same)
        return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def make_batch(runner: ModelRunner, counts: list[int], context: int) -> Batch:
    """Return the batch of a step in which sequence i computes counts[i] tokens, the last of `context` tokens."""
    step, width = plan([context] * len(counts), counts, SAMPLINGS[0], 0), -(-context // runner.block_size)
    for group, total in enumerate(runner.num_blocks):
        for slot in step.slots:  # block 0 is the null block of a group with a window
            blocks = 1 + np.arange(slot * width, (slot + 1) * width) % (total - 1)
            step.blocks.append(BlockChange(slot, 0, blocks.tolist(), group=group))
    inputs = runner.prepare(step)
    forward = Forward(inputs, inputs.batch)
    for before in runner.parts.before:
        before(forward)
    assert forward.batch is not None
    return forward.batch


def fill(runner: ModelRunner) -> None:
    """Fill KV and states: until it is written, all memory is one page of zeros, which every cache holds."""
    for tensor in memory_of(runner):
        tensor.fill_(0.01)


def measure_step(runner: ModelRunner, watch: Watch, name: str) -> dict[str, Work]:
    """Measure a step: SEQUENCES x TOKENS @ CONTEXT."""
    sequences, tokens, context = (int(number) for number in name.replace("@", "x").split("x"))
    counts = [tokens] * sequences
    batch, ids = make_batch(runner, counts, context), torch.zeros(sequences * tokens, dtype=torch.int64)
    last, model = batch.query_start[1:].long() - 1, runner.model
    return watch.measure(lambda: model.best(model(ids, batch)[last]), counts, context)


def peak_flops(clock: Callable[[], float]) -> float:
    rows, inputs, outputs = PEAK
    x, weight = torch.randn(rows, inputs).bfloat16(), linear.pack(torch.randn(outputs, inputs).bfloat16())
    best = np.inf
    for _ in range(PEAK_REPETITIONS):
        started = clock()
        linear.linear(x, weight)
        best = min(best, clock() - started)
    return 2 * rows * inputs * outputs / best


def show_report(report: KernelsReport) -> None:
    for name, kernels in report.steps.items():
        total = sum(work.seconds for work in kernels.values())
        table = make_table("kernel", "calls", "ms", "share", "GFLOP/s", "of the peak", "GB/s")
        for kernel, work in kernels.items():
            rate, speed = work.flops / work.seconds / 1e9, work.bytes / work.seconds / 1e9
            computed = (figure(rate, 0), f"{rate / report.peak_gflops:.0%}") if work.flops else ("", "")
            table.add_row(
                kernel, str(work.calls), figure(1e3 * work.seconds, 2), f"{work.seconds / total:.0%}", *computed,
                figure(speed, 1),
            )  # fmt: skip
        machine = f"{report.peak_gflops:.0f} GFLOP/s, {report.bandwidth_gb_per_s:.0f} GB/s"
        show(f"{report.model}, {name}: {1e3 * total:.1f} ms; {report.threads} threads ({machine})", table)


def main(
    model: ModelOption = "pocket",
    steps: Annotated[str, typer.Option(help="SEQUENCESxTOKENS@CONTEXT, with commas.")] = "1x1@200,64x1@160,1x512@512",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure each kernel of a step on a CPU."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    config = EngineConfig(model=model, dtype="bfloat16", device="cpu", num_threads=threads, kv_cache_memory_bytes=2**31)
    with closing(build_engine(config)) as core:
        runner = core.ranks.runner
        fill(runner)
        report = KernelsReport(model, threads, peak_flops(clock) / 1e9, measure_bandwidth(torch.device("cpu")) / 1e9)
        watch = Watch(clock)
        with torch.inference_mode():
            for name in steps.split(","):
                report.steps[name] = measure_step(runner, watch, name)
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)

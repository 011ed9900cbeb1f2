"""Microseconds of the host that the tape adds to a decode step, and its bytes per step.

Engines decode the same on a device that computes nothing, one with a tape and one without, each in a process of its
own: in one process, each would slow the other, because Python specializes code for the objects that it meets. CPU time
of the thread, so that other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Annotated

import typer

from benchmarks.command import JsonOption, print_json, run
from benchmarks.host import UNMEASURED, decoding_core, drafts_of_any_cost, idle_compute, step
from cluster.cli.bench.tables import figure, make_table, show


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one engine, in microseconds of CPU time."""

    median_us: float
    quick_us: float  #: that a tenth of the steps do not take
    bytes_per_step: float
    take_ms: float  #: of wall time, to take the tape


@dataclass(frozen=True, slots=True)
class TapeCost:
    """Microseconds per step: medians of the pairs' differences."""

    sampling: str
    sequences: int
    without_us: float
    added_us: float
    quick_added_us: float
    least_us: float  #: of all pairs
    most_us: float
    bytes_per_step: float
    take_ms: float


def measure_steps(sampling: str, sequences: int, tape_mib: int, steps: int) -> Steps:
    core, spent = decoding_core(sampling, sequences, tape_mib=tape_mib), list[float]()
    with idle_compute(core), drafts_of_any_cost():
        while any(request.num_output == 0 for request in core.scheduler.queue.live.values()):
            core.step()
        for _ in range(UNMEASURED):
            step(core)
        size, first = len(core.tape.take()), core.scheduler.totals.steps
        for _ in range(steps):
            started = time.thread_time()
            step(core)
            spent.append(1e6 * (time.thread_time() - started))
        started = time.perf_counter()
        tape = core.tape.take()
        take_ms = 1000 * (time.perf_counter() - started)
    per_step = (len(tape) - size) / (core.scheduler.totals.steps - first)
    core.close()
    return Steps(statistics.median(spent), statistics.quantiles(spent, n=10)[0], per_step, take_ms)


def measure(sampling: str, sequences: int, steps: int, pairs: int) -> TapeCost:
    found: dict[int, list[Steps]] = {0: [], 16: []}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for pair in range(pairs):
            for mib in sorted(found, reverse=pair % 2 == 1):
                found[mib].append(processes.submit(measure_steps, sampling, sequences, mib, steps).result())
    both = list(zip(found[0], found[16], strict=True))
    added = [on.median_us - off.median_us for off, on in both]
    return TapeCost(
        sampling,
        sequences,
        statistics.median(off.median_us for off, _ in both),
        statistics.median(added),
        statistics.median(on.quick_us - off.quick_us for off, on in both),
        min(added),
        max(added),
        statistics.median(on.bytes_per_step for _, on in both),
        statistics.median(on.take_ms for _, on in both),
    )


def main(
    sequences: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "1,64,256",
    samplings: Annotated[str, typer.Option(help="Of benchmarks.host.")] = "greedy,drafts",
    steps: Annotated[int, typer.Option(min=2, help="Steps of each engine.")] = 300,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of engines.")] = 7,
    as_json: JsonOption = False,
) -> None:
    """Measure what the tape costs a decode step.

    Example: python -m benchmarks.tape --sequences 64
    """
    found = [measure(sampling, int(n), steps, pairs) for sampling in samplings.split(",") for n in sequences.split(",")]
    if as_json:
        return print_json([asdict(cost) for cost in found])
    table = make_table(
        "", "step without, µs", "tape adds, µs", "least", "most", "in quick steps, µs", "bytes per step", "take, ms"
    )
    for cost in found:
        numbers = (cost.without_us, cost.added_us, cost.least_us, cost.most_us, cost.quick_added_us,
                   cost.bytes_per_step, cost.take_ms)  # fmt: skip
        table.add_row(f"{cost.sampling} {cost.sequences}", *(figure(number, 1) for number in numbers))
    show(f"CPU time of the host per step, {pairs} pairs of engines with {steps} steps each", table)


if __name__ == "__main__":
    run(main)

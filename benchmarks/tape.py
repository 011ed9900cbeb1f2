"""Microseconds of the host that the tape adds to a decode step, and its bytes per step.

Two engines decode the same on a device that computes nothing, one with a tape and one without, in turns of some steps.
CPU time of the thread, so that other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from benchmarks.command import JsonOption, print_json, run
from benchmarks.host import UNMEASURED, decoding_core, drafts_of_any_cost, idle_compute, step
from cluster.cli.bench.tables import figure, make_table, show
from engine.core.engine import EngineCore

TURN = 10  # steps


@dataclass(frozen=True, slots=True)
class TapeCost:
    """Microseconds per step: the difference of the medians, and that of the quickest tenth of all steps."""

    sampling: str
    sequences: int
    without_us: float
    added_us: float
    quick_added_us: float
    bytes_per_step: float
    take_ms: float  #: of wall time, to take the tape


def measure(sampling: str, sequences: int, turns: int) -> TapeCost:
    off, on = (decoding_core(sampling, sequences, tape_mib=mib) for mib in (0, 16))
    spent: dict[EngineCore, list[float]] = {off: [], on: []}
    with idle_compute(off), idle_compute(on), drafts_of_any_cost():
        for core in (off, on):
            while any(request.num_output == 0 for request in core.scheduler.queue.live.values()):
                core.step()
            for _ in range(UNMEASURED):
                step(core)
        size, steps = len(on.tape.take()), on.scheduler.totals.steps
        for turn in range(turns):
            for core in (off, on) if turn % 2 else (on, off):
                for _ in range(TURN):
                    started = time.thread_time()
                    step(core)
                    spent[core].append(1e6 * (time.thread_time() - started))
        started = time.perf_counter()
        tape = on.tape.take()
        take_ms = 1000 * (time.perf_counter() - started)
        per_step = (len(tape) - size) / (on.scheduler.totals.steps - steps)
    for core in (off, on):
        core.close()
    without, with_tape = spent[off], spent[on]
    return TapeCost(
        sampling,
        sequences,
        statistics.median(without),
        statistics.median(with_tape) - statistics.median(without),
        statistics.quantiles(with_tape, n=10)[0] - statistics.quantiles(without, n=10)[0],
        per_step,
        take_ms,
    )


def main(
    sequences: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "1,64,256",
    samplings: Annotated[str, typer.Option(help="Of benchmarks.host.")] = "greedy,drafts",
    turns: Annotated[int, typer.Option(min=2, help="Turns of 10 steps of each engine.")] = 60,
    as_json: JsonOption = False,
) -> None:
    """Measure what the tape costs a decode step.

    Example: python -m benchmarks.tape --sequences 64
    """
    found = [measure(sampling, int(n), turns) for sampling in samplings.split(",") for n in sequences.split(",")]
    if as_json:
        return print_json([asdict(cost) for cost in found])
    table = make_table("", "step without, µs", "tape adds, µs", "in quick steps, µs", "bytes per step", "take, ms")
    for cost in found:
        numbers = (cost.without_us, cost.added_us, cost.quick_added_us, cost.bytes_per_step, cost.take_ms)
        table.add_row(f"{cost.sampling} {cost.sequences}", *(figure(number, 1) for number in numbers))
    show(f"CPU time of the host per step, {turns} turns of {TURN} steps each", table)


if __name__ == "__main__":
    run(main)

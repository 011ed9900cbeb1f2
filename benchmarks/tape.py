"""Microseconds of the host that the tape adds to a decode step, and its bytes per step.

An engine decodes on a device that computes nothing. What is measured is the time in the tape's two calls of a step that
is not in the scheduler's own calls: whole steps differ by more than the tape costs. What the tape does later, while the
device computes, is measured apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks.command import JsonOption, print_json, run
from benchmarks.host import UNMEASURED, decoding_core, drafts_of_any_cost, idle_compute, step
from cluster.terminal.tables import figure, make_table, show
from engine.core.scheduler import Scheduler
from engine.parts.tape.recorder import Tape


@dataclass(frozen=True, slots=True)
class TapeCost:
    """Microseconds per step."""

    sampling: str
    sequences: int
    step_us: float  #: CPU time of a step with the tape, median
    tape_us: float  #: median of the time in the tape, of which reading the clock takes `clock_us`
    quick_us: float  #: that a tenth of the steps do not take
    clock_us: float
    later_us: float  #: mean of the time in which the device computes, without the clock
    bytes_per_step: float
    take_ms: float  #: to take the tape


class Watch:
    """Adds up the time in some calls."""

    def __init__(self) -> None:
        self.ns = 0

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args)
            self.ns += time.perf_counter_ns() - started
            return result

        return timed


def clock_us() -> float:
    """Return what a Watch around a Watch measures of calls that do nothing, twice, as in a step."""
    found = []
    for _ in range(1000):
        inside, outside = Watch(), Watch()
        call = outside.of(inside.of(lambda now: now))
        call(0), call(0)
        found.append((outside.ns - inside.ns) / 1000)
    return statistics.median(found)


def measure(sampling: str, sequences: int, steps: int) -> TapeCost:
    inside, outside, later = Watch(), Watch(), Watch()
    with (
        mock.patch.object(Scheduler, "schedule", inside.of(Scheduler.schedule)),
        mock.patch.object(Scheduler, "commit", inside.of(Scheduler.commit)),
    ):  # before the tape covers them
        core = decoding_core(sampling, sequences, tape_mib=16)
    tape, scheduler = core.journal, core.scheduler
    assert isinstance(tape, Tape)
    scheduler.schedule, scheduler.commit = outside.of(scheduler.schedule), outside.of(scheduler.commit)  # type: ignore[method-assign]
    tape.settle = later.of(tape.settle)  # type: ignore[method-assign]
    whole, own, after = list[float](), list[float](), list[float]()
    with idle_compute(core), drafts_of_any_cost():
        while any(request.num_output == 0 for request in scheduler.queue.live.values()):
            core.step()
        for _ in range(UNMEASURED):
            step(core)
        tape._ring.settle()
        size, first = len(tape._ring.entries), scheduler.totals.steps
        for _ in range(steps):
            inside.ns = outside.ns = later.ns = 0
            started = time.thread_time()
            step(core)
            whole.append(1e6 * (time.thread_time() - started))
            own.append((outside.ns - inside.ns) / 1000)
            after.append(later.ns / 1000)
        tape._ring.settle()
        recorded = (len(tape._ring.entries) - size) / (scheduler.totals.steps - first)
    started = time.perf_counter()
    tape.take()
    take_ms = 1000 * (time.perf_counter() - started)
    core.close()
    return TapeCost(
        sampling,
        sequences,
        statistics.median(whole),
        statistics.median(own),
        statistics.quantiles(own, n=10)[0],
        clock := clock_us(),
        statistics.mean(after) - clock / 2,
        recorded,
        take_ms,
    )


def main(
    sequences: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "1,64,256",
    samplings: Annotated[str, typer.Option(help="Of benchmarks.host.")] = "greedy,drafts",
    steps: Annotated[int, typer.Option(min=2, help="Steps to measure.")] = 300,
    as_json: JsonOption = False,
) -> None:
    """Measure what the tape costs a decode step.

    Example: python -m benchmarks.tape --sequences 64
    """
    found = [measure(sampling, int(n), steps) for sampling in samplings.split(",") for n in sequences.split(",")]
    if as_json:
        return print_json([asdict(cost) for cost in found])
    table = make_table(
        "",
        "step, µs",
        "tape, µs",
        "in quick steps",
        "of these the clock",
        "while it computes",
        "bytes per step",
        "take, ms",
    )
    for cost in found:
        on_path = cost.step_us, cost.tape_us, cost.quick_us, cost.clock_us
        numbers = (*on_path, cost.later_us, cost.bytes_per_step, cost.take_ms)
        table.add_row(f"{cost.sampling} {cost.sequences}", *(figure(number, 1) for number in numbers))
    show(f"Time of the host per step, {steps} steps", table)


if __name__ == "__main__":
    run(main)

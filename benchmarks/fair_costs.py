"""Shares of two clients in the time of an engine, by the fair queue: `python -m benchmarks.fair_costs`.

Both always have requests that wait. One has long prompts and short answers, the other short prompts and long answers.
The queue charges tokens alone, as it did before, or what requests have really cost, too. Weights are random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.command import DtypeOption, JsonOption, print_report, run
from benchmarks.costs import SEQUENCES, VOCAB, Load, small_engine
from cluster.terminal.tables import make_table, show
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.fairness.fair_queue import FairQueue, QueuedRequest
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import SequenceCost
from engine.wire.sampling_params import SamplingParams

CLIENTS = {"long prompts": Load(0, 640, 4), "long answers": Load(0, 16, 128)}
DEPTH = 2 * SEQUENCES  # requests of each client that wait


@dataclass(frozen=True, slots=True)
class FairReport:
    seconds: dict[str, dict[str, float]]
    """Seconds of the engine of each client, by what the queue charges."""


def compute(core: EngineCore, by_cost: bool, requests: int) -> dict[str, float]:
    """Return the seconds of each client, until this many requests have ended. by_cost: whether the queue learns what
    they have cost."""
    core.apply(CacheCleared())
    rng, queue = random.Random(1), FairQueue(SEQUENCES, 10_000, 10_000_000)
    seconds, waiting = dict.fromkeys(CLIENTS, 0.0), dict.fromkeys(CLIENTS, 0)
    running: dict[str, QueuedRequest] = {}
    ended = started = 0
    while ended < requests:
        for client, load in CLIENTS.items():
            while waiting[client] < DEPTH:
                queue.offer(QueuedRequest(client, 1, load.prompt))
                waiting[client] += 1
        for queued in queue.start():
            load, name, started = CLIENTS[queued.client], f"{started}", started + 1
            waiting[queued.client] -= 1
            running[name] = queued
            params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
            prompt = rng.choices(range(3, VOCAB), k=load.prompt)
            core.add(GenerateRequest(request_id=name, prompt=prompt, params=params))
        for event in core.step():
            queued = running[event.request.request_id]
            queue.charge(queued, len(event.delta.token_ids))
            for cost in event.delta.records(SequenceCost):
                if by_cost:
                    queue.settle(queued, cost.compute_s)
                seconds[queued.client] += cost.compute_s
                queue.leave(queued)
                ended += 1
    for name in running:
        core.abort(name)
    while core.has_work:
        core.step()
    return seconds


def measure(dtype: str, requests: int) -> FairReport:
    with small_engine(dtype) as core:
        compute(core, True, SEQUENCES)  # warms up
        return FairReport({name: compute(core, name == "costs", requests) for name in ("tokens", "costs")})


def show_report(report: FairReport) -> None:
    table = make_table("charged", *(f"{client}, s" for client in CLIENTS), "share of the first")
    for charged, seconds in report.seconds.items():
        first = next(iter(seconds.values())) / sum(seconds.values())
        table.add_row(charged, *(f"{value:.2f}" for value in seconds.values()), f"{first:.2f}")
    show("seconds of the engine of two clients that always wait", table)


def main(
    *,
    dtype: DtypeOption = "bfloat16",
    requests: Annotated[int, typer.Option(help="Requests of both clients.")] = 200,
    as_json: JsonOption = False,
) -> None:
    print_report(measure(dtype, requests), as_json, show_report)


if __name__ == "__main__":
    run(main)

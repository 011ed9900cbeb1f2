"""Microseconds that bills and limits add to a decode step and to a request: `python -m benchmarks.bills`.

There is no switch that turns bills off. So the engine is compared with one without the part of costs, on a device that
computes nothing, and the ingress with one that counts no costs, before an engine that only answers. They take turns.
CPU time of the thread, so that other processes do not count.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks.command import JsonOption, print_json, run
from benchmarks.host import UNMEASURED, decoding_core, idle_compute, step
from cluster.terminal.tables import figure, make_table, show
from deployments.billing.prices import Prices
from deployments.frontend.api_keys import key_line
from deployments.frontend.costs.sequence_costs import SequenceCosts
from deployments.frontend.sequence_metrics import SequenceMetrics
from deployments.http.middleware import AuthConfig
from deployments.quotas.limits import BudgetLimit, KeyLimits
from engine.assembly import build
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import SequenceCost
from engine.wire.sampling_params import SamplingParams
from tests.deployments.fake_api import fake_api, says

TURN, REQUESTS = 10, 32  # steps and requests of a turn
PROMPT, OUTPUT = 300, 4  # tokens of each, in the engine
LIMITS = KeyLimits(
    rpm_limit=10**6,
    tpm_limit=10**9,
    max_parallel_requests=1000,
    budget_limits=(BudgetLimit(budget_duration="1mo", max_budget=1e9),),
)


@dataclass(frozen=True, slots=True)
class BillCost:
    """Microseconds: the least of all, since what others do on the machine only adds to it, and medians."""

    what: str
    without_us: float
    added_us: float
    median_added_us: float

    @classmethod
    def of(cls, what: str, without: list[float], with_bills: list[float]) -> BillCost:
        added = min(with_bills) - min(without)
        return cls(what, min(without), added, statistics.median(with_bills) - statistics.median(without))


def nothing(*_: Any, **__: Any) -> int:
    return 0


def cores(sequences: int, stack: ExitStack) -> tuple[EngineCore, EngineCore]:
    """Return two engines with so many sequences, without bills and with them."""
    with mock.patch.object(build, "PARTS", tuple(part for part in build.PARTS if part != "costs")):
        off = decoding_core("greedy", sequences)
    on = decoding_core("greedy", sequences)
    for core in (off, on):
        stack.enter_context(idle_compute(core))
        stack.callback(core.close)
    return off, on


def measure_steps(sequences: int, turns: int) -> BillCost:
    with ExitStack() as stack:
        off, on = cores(sequences, stack)
        spent: dict[EngineCore, list[float]] = {off: [], on: []}
        for core in (off, on):
            while any(request.num_output == 0 for request in core.scheduler.queue.live.values()):
                core.step()
            for _ in range(UNMEASURED):
                step(core)
        for turn in range(turns):
            for core in (off, on) if turn % 2 else (on, off):
                for _ in range(TURN):
                    started = time.thread_time()
                    step(core)
                    spent[core].append(1e6 * (time.thread_time() - started))
    return BillCost.of(f"decode step, {sequences} sequences", spent[off], spent[on])


def measure_requests(turns: int) -> BillCost:
    """Measure the whole life of requests in the engine."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT)
    with ExitStack() as stack:
        off, on = cores(REQUESTS, stack)
        spent: dict[EngineCore, list[float]] = {off: [], on: []}
        for core in (off, on):
            for request_id in list(core.scheduler.queue.live):
                core.abort(request_id)
        for turn in range(-2, turns):
            for core in (off, on) if turn % 2 else (on, off):
                prompts = [[3 + (7 * i + 31 * turn + j) % 900 for j in range(PROMPT)] for i in range(REQUESTS)]
                started = time.thread_time()
                for i, prompt in enumerate(prompts):
                    core.add(GenerateRequest(request_id=f"{turn} {i}", prompt=prompt, params=params))
                while core.has_work:
                    core.step()
                if turn >= 0:
                    spent[core].append(1e6 * (time.thread_time() - started) / REQUESTS)
    return BillCost.of(f"request in the engine, {OUTPUT} tokens", spent[off], spent[on])


def measure_ingress(turns: int) -> list[BillCost]:
    """Measure the whole life of requests in the ingress: what bills add, and what the limits of a key add to that."""
    return asyncio.run(_measure_ingress(turns))


async def _measure_ingress(turns: int) -> list[BillCost]:
    auth = AuthConfig(api_keys=(key_line("free", "sk-free"), key_line("limited", "sk-limited")),
                      key_limits={"limited": LIMITS})  # fmt: skip
    no_bills = [(SequenceCosts, "arrived"), (SequenceMetrics, "billed")]
    kinds: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
        "no bills": ("free", lambda: patched(no_bills)),
        "bills": ("free", nullcontext),
        "limits": ("limited", nullcontext),
    }
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    body = {"model": "fake", "prompt": "abcd", "max_tokens": OUTPUT}
    async with fake_api(says("hello"), auth=auth, prices=Prices(engine_hour=1.0), step_ms=0) as api:
        api.engine.cost = SequenceCost(0.01, 0.0, 0.01)
        for turn in range(-2, turns):
            for kind in sorted(kinds, reverse=bool(turn % 2)):
                key, patch = kinds[kind]
                with patch():
                    started = time.thread_time()
                    for _ in range(REQUESTS):
                        headers = {"authorization": f"Bearer sk-{key}"}
                        answer = await api.client.post("/v1/completions", json=body, headers=headers)
                        assert answer.status_code == 200, answer.text
                    if turn >= 0:
                        spent[kind].append(1e6 * (time.thread_time() - started) / REQUESTS)
    return [
        BillCost.of("request in the ingress: its bill", spent["no bills"], spent["bills"]),
        BillCost.of("the same: four limits of its key", spent["bills"], spent["limits"]),
    ]


def patched(methods: list[tuple[type, str]]) -> ExitStack:
    """Let these methods do nothing."""
    stack = ExitStack()
    for owner, name in methods:
        stack.enter_context(mock.patch.object(owner, name, nothing))
    return stack


def main(
    sequences: Annotated[str, typer.Option(help="Sequences that decode together; one or more numbers.")] = "64,256",
    turns: Annotated[int, typer.Option(min=10, help="Turns of 10 steps, and of 32 requests, of each.")] = 60,
    as_json: JsonOption = False,
) -> None:
    """Measure what bills and limits cost.

    Example: python -m benchmarks.bills --sequences 64
    """
    found = [measure_steps(int(n), turns) for n in sequences.split(",")]
    found += [measure_requests(turns), *measure_ingress(turns)]
    if as_json:
        return print_json([asdict(cost) for cost in found])
    table = make_table("", "without, µs", "added, µs", "of the medians, µs")
    for cost in found:
        numbers = (cost.without_us, cost.added_us, cost.median_added_us)
        table.add_row(cost.what, *(figure(number, 1) for number in numbers))
    show(f"CPU time of the host, {turns} turns of {TURN} steps or {REQUESTS} requests", table)


if __name__ == "__main__":
    run(main)

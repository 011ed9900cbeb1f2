"""Agents whose contexts outgrow the KV cache, with tiers below it and without: `python -m benchmarks.kv_offloading`.

Each agent takes a turn, pauses while a tool runs, and comes back with the answer and the tool's output appended. All
engines see the same turns in the same order, one after the other: what an agent finds cached depends on the order, and
not on how fast an engine is. The engines' clocks skip the pauses.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.agent_load import (
    AnswerOption,
    FirstOption,
    Load,
    ModelOption,
    OvercommitOption,
    ToolOption,
    percentiles,
)
from benchmarks.command import JsonOption, print_report, run
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.kv_offload import KVOffloadStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta

TIERS = ("host", "disk", "store", "small host", "small host + store")
SMALL = 1.5  # size of a small host memory, in caches


class SkippingClock:
    """The clock of an engine, which skips the pauses of agents."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped

    def wait_until(self, at: float) -> None:
        self.skipped += max(0.0, at - self.monotonic())


@dataclass(slots=True)
class Turns:
    """What turns ask of the engine besides their answers, and what comes of it; here nothing."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request of a turn as the engine gets it."""
        return request

    def answered(self, agent: int, at: float, deltas: Sequence[TokenDelta], first_token_s: float) -> None:
        """Note the answer to an agent's turn. at: when the turn began, in seconds on the engine's clock."""


@dataclass(frozen=True, slots=True)
class Row:
    """An engine that is measured."""

    name: str
    tier: str
    turns: type[Turns] = Turns


@dataclass(frozen=True, slots=True)
class TierResult:
    row: str
    resumed_tokens: int  #: prompt tokens of all turns but the first ones
    cached_tokens: int  #: of these
    first_token_s: list[float]  #: of these turns
    seconds: float
    errors: dict[str, int]
    answers: list[list[int]]
    turns: Turns


@dataclass(frozen=True, slots=True)
class OffloadReport:
    model: str
    load: Load
    cache_tokens: int
    outcomes: list[TierResult]
    equal_answers: bool


def order_of_turns(load: Load) -> list[tuple[float, int]]:
    """Return when each turn begins, in seconds, and its agent. Pauses are 5 s to 5 min, most of them short
    (log-uniform)."""
    draw = random.Random(1)
    due = [(draw.uniform(0, 60), agent) for agent in range(load.agents)]
    left = [load.turns] * load.agents
    order = []
    while due:
        due.sort()
        at, agent = due.pop(0)
        order.append((at, agent))
        left[agent] -= 1
        if left[agent]:
            due.append((at + 5 * 60 ** draw.random(), agent))
    return order


def drive(core: EngineCore, load: Load, row: Row, clock: SkippingClock) -> TierResult:
    draw, vocab_size = random.Random(2), core.model_config.vocab_size
    contexts = [draw.choices(range(3, vocab_size), k=load.first) for _ in range(load.agents)]
    resumed = cached = 0
    first_token_s: list[float] = []
    answers, turns = [], row.turns()
    params = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True)
    began, start, offloading = time.perf_counter(), clock.monotonic(), core.scheduler.parts.get(KVOffloading)
    for number, (at, agent) in enumerate(order_of_turns(load)):
        while offloading is not None and not offloading.flushed():
            core.step()  # in a pause there is time for it
        clock.wait_until(start + at)
        context, is_first = contexts[agent], len(contexts[agent]) == load.first
        tool = draw.choices(range(3, vocab_size), k=load.tool)
        prompt = context if is_first else [*context, *tool]
        started, first, began_at = time.perf_counter(), None, clock.monotonic()
        request = GenerateRequest(request_id=str(number), prompt=prompt, params=params, client=f"agent {agent}")
        core.add(turns.asked(request))
        deltas: list[TokenDelta] = []
        while core.has_work:
            for event in core.step():
                first = first or time.perf_counter()
                deltas.append(event.delta)
        assert first is not None
        turns.answered(agent, began_at, deltas, first - started)
        answer = [token for delta in deltas for token in delta.token_ids]
        contexts[agent] = [*prompt, *answer]
        answers.append(answer)
        if not is_first:
            first_token_s.append(first - started)
            resumed += len(prompt)
            cached += sum(delta.num_cached_tokens for delta in deltas)
    tiers = core.stats().record(KVOffloadStats)
    errors = {} if tiers is None else {f"{t} {k}": n for t, s in tiers.tiers.items() for k, n in s.errors.items()}
    return TierResult(row.name, resumed, cached, first_token_s, time.perf_counter() - began, errors, answers, turns)


def options_of(tier: str, folder: Path, cache_gib: float) -> dict[str, Any]:
    """Return the engine's options for a tier. cache_gib: size of the KV cache."""
    store: dict[str, Any] = {
        "kv_offloading_store": str(folder / f"store of {tier}"),
        "kv_offloading_store_size": 1.0,
        "kv_offloading_key_file": str(folder / "key"),
    }
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "host": {"kv_offloading_size": 1.0},
        "disk": {"kv_offloading_disk_size": 1.0, "kv_offloading_dir": str(folder / "kv")},
        "store": store,
        "small host": {"kv_offloading_size": SMALL * cache_gib},
        "small host + store": {"kv_offloading_size": SMALL * cache_gib, **store},
    }
    return options[tier]


def measure(
    model: str, load: Load, overcommit: float, threads: int, block_size: int, rows: Sequence[Row]
) -> OffloadReport:
    """overcommit: tokens of all contexts at the end, per token that fits the cache."""
    tokens = int(load.agents * load.longest / overcommit)
    outcomes, cache_gib = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        key_file.write_bytes(os.urandom(32))
        key_file.chmod(0o600)
        for row in rows:
            config = EngineConfig(
                model=model, num_threads=threads, block_size=block_size,
                num_gpu_blocks_override=-(-tokens // block_size),
                max_num_seqs=4, max_model_len=load.longest + load.tool, **options_of(row.tier, Path(folder), cache_gib),
            )  # fmt: skip
            clock = SkippingClock()
            core = build_engine(config, clock=Clock(clock.monotonic))
            pool = core.scheduler.kv_cache.pool
            cache_gib = pool.num_blocks * pool.block_bytes / 2**30
            drive(core, Load(2, 2, 64, 16, 4), row, clock)  # warms up
            core.apply(CacheCleared())
            outcomes.append(drive(core, load, row, clock))
            core.close()
    equal = all(outcome.answers == outcomes[0].answers for outcome in outcomes)
    return OffloadReport(model, load, tokens, outcomes, equal)


def show_report(
    report: OffloadReport, more: Sequence[str] = (), cells_of: Callable[[TierResult], Sequence[str]] = lambda _: ()
) -> None:
    """more: further columns, whose cells `cells_of` returns."""
    load = report.load
    columns = ("tokens cached", "first token P50 ms", "P99 ms", "ratio of P50", "s")
    table = make_table("tier", *columns, *more)
    plain = statistics.median(report.outcomes[0].first_token_s)
    for outcome in report.outcomes:
        p50, p99 = percentiles(outcome.first_token_s)
        table.add_row(
            outcome.row,
            f"{outcome.cached_tokens / outcome.resumed_tokens:.0%}",
            figure(1000 * p50, 1),
            figure(1000 * p99, 1),
            figure(plain / p50, 2),
            figure(outcome.seconds, 1),
            *cells_of(outcome),
        )
    print(f"{load}; {report.cache_tokens} tokens fit the cache")
    show(table)
    print(f"answers {'equal' if report.equal_answers else 'DIFFERENT'}; errors: {report.outcomes[-1].errors or 'none'}")


def main(
    model: ModelOption = "pocket",
    agents: int = 20,
    turns: int = 10,
    first: FirstOption = 400,
    tool: ToolOption = 80,
    answer: AnswerOption = 24,
    overcommit: OvercommitOption = 5.0,
    threads: int = 1,
    block_size: int = 16,
    tier: Annotated[list[str] | None, typer.Option(help="Row of the table, may be repeated. Default: all.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure what agents find cached when they come back, and how soon their first token comes."""
    rows = [Row(name, name) for name in ("none", *(tier or TIERS))]
    report = measure(model, Load(agents, turns, first, tool, answer), overcommit, threads, block_size, rows)
    print_report(report, json_output, show_report)


if __name__ == "__main__":
    run(main)

"""Agents whose contexts outgrow the KV cache, with tiers below it and without: `python -m benchmarks.kv_offloading`.

Each agent takes a turn, pauses while a tool runs, and comes back with the answer and the tool's output appended. All
engines see the same turns in the same order, one after the other: what an agent finds cached depends on the order, and
not on how fast an engine is.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.cli.bench.tables import figure, make_table, show
from engine.config import EngineConfig
from engine.core.build import build_engine
from engine.core.engine import EngineCore
from engine.wire.messages import GenerateRequest
from engine.wire.sampling_params import SamplingParams

TIERS = ("none", "host", "disk")


@dataclass(frozen=True, slots=True)
class Load:
    agents: int
    turns: int
    first: int  #: tokens of an agent's first prompt
    tool: int  #: tokens that a tool adds
    answer: int  #: tokens
    overcommit: float  #: tokens of all contexts at the end, per token that fits the cache

    @property
    def longest(self) -> int:
        return self.first + self.turns * (self.tool + self.answer)


@dataclass(frozen=True, slots=True)
class Outcome:
    tier: str
    resumed_tokens: int  #: prompt tokens of all turns but the first ones
    cached_tokens: int  #: of these
    first_token_s: list[float]  #: of these turns
    seconds: float
    errors: dict[str, int]
    answers: list[list[int]]


@dataclass(frozen=True, slots=True)
class OffloadReport:
    model: str
    load: Load
    cache_tokens: int
    outcomes: list[Outcome]
    equal_answers: bool


def order_of_turns(load: Load) -> list[int]:
    """Return the agent of each turn. Pauses are 5 s to 5 min, most of them short (log-uniform)."""
    draw = random.Random(1)
    due = [(draw.uniform(0, 60), agent) for agent in range(load.agents)]
    left = [load.turns] * load.agents
    order = []
    while due:
        due.sort()
        at, agent = due.pop(0)
        order.append(agent)
        left[agent] -= 1
        if left[agent]:
            due.append((at + 5 * 60 ** draw.random(), agent))
    return order


def drive(core: EngineCore, load: Load, tier: str) -> Outcome:
    draw, vocab_size = random.Random(2), core.model_config.vocab_size
    contexts = [draw.choices(range(3, vocab_size), k=load.first) for _ in range(load.agents)]
    resumed = cached = 0
    first_token_s: list[float] = []
    answers = []
    params = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True)
    began = time.perf_counter()
    for number, agent in enumerate(order_of_turns(load)):
        context, is_first = contexts[agent], len(contexts[agent]) == load.first
        tool = draw.choices(range(3, vocab_size), k=load.tool)
        prompt = context if is_first else [*context, *tool]
        started, first = time.perf_counter(), None
        core.add(GenerateRequest(request_id=str(number), prompt=prompt, params=params))
        answer: list[int] = []
        hit = 0
        while core.has_work:
            for event in core.step():
                first = first or time.perf_counter()
                answer += event.delta.token_ids
                hit += event.delta.num_cached_tokens
        assert first is not None
        contexts[agent] = [*prompt, *answer]
        answers.append(answer)
        if not is_first:
            first_token_s.append(first - started)
            resumed, cached = resumed + len(prompt), cached + hit
    tiers = core.stats().kv_offload
    errors = {} if tiers is None else {f"{t} {k}": n for t, s in tiers.tiers.items() for k, n in s.errors.items()}
    return Outcome(tier, resumed, cached, first_token_s, time.perf_counter() - began, errors, answers)


def measure(model: str, load: Load, threads: int, block_size: int) -> OffloadReport:
    tokens = int(load.agents * load.longest / load.overcommit)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "none": {},
            "host": {"kv_offloading_size": 1.0},
            "disk": {"kv_offloading_disk_size": 1.0, "kv_offloading_dir": str(Path(folder, "kv"))},
        }
        for tier in TIERS:
            config = EngineConfig(
                model=model, num_threads=threads, block_size=block_size, num_blocks=-(-tokens // block_size),
                max_num_seqs=4, max_model_len=load.longest + load.tool, **options[tier],  # type: ignore[arg-type]
            )  # fmt: skip
            core = build_engine(config)
            drive(core, Load(2, 2, 64, 16, 4, 1.0), tier)  # warms up
            core.scheduler.clear_cache()
            outcomes.append(drive(core, load, tier))
            core.close()
    equal = all(outcome.answers == outcomes[0].answers for outcome in outcomes)
    return OffloadReport(model, load, tokens, outcomes, equal)


def show_report(report: OffloadReport) -> None:
    load = report.load
    title = (
        f"{load.agents} agents, {load.turns} turns each, contexts up to {load.longest} tokens; "
        f"{report.cache_tokens} tokens fit the cache"
    )
    table = make_table("tier", "tokens cached", "first token P50 ms", "P99 ms", "ratio of P50", "s")
    plain = statistics.median(report.outcomes[0].first_token_s)
    for outcome in report.outcomes:
        times = sorted(outcome.first_token_s)
        p50, p99 = statistics.median(times), times[int(0.99 * (len(times) - 1))]
        table.add_row(
            outcome.tier,
            f"{outcome.cached_tokens / outcome.resumed_tokens:.0%}",
            figure(1000 * p50, 1),
            figure(1000 * p99, 1),
            figure(plain / p50, 2),
            figure(outcome.seconds, 1),
        )
    print(title)
    show(table)
    print(f"answers {'equal' if report.equal_answers else 'DIFFERENT'}; errors: {report.outcomes[-1].errors or 'none'}")


def main(
    model: Annotated[str, typer.Option(help="Model folder, or `pocket`.")] = "pocket",
    agents: int = 20,
    turns: int = 10,
    first: Annotated[int, typer.Option(help="Tokens of an agent's first prompt.")] = 400,
    tool: Annotated[int, typer.Option(help="Tokens that a tool adds.")] = 80,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 24,
    overcommit: Annotated[float, typer.Option(help="Tokens of all contexts per token that fits the cache.")] = 5.0,
    threads: int = 1,
    block_size: int = 16,
    json_output: JsonOption = False,
) -> None:
    """Measure what agents find cached when they come back, and how soon their first token comes."""
    report = measure(model, Load(agents, turns, first, tool, answer, overcommit), threads, block_size)
    print_report(report, json_output, show_report)


if __name__ == "__main__":
    run(main)

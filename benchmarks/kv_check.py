"""What checks of cached KV cost: `python -m benchmarks.kv_check`.

Agents whose contexts outgrow the KV cache come back, and find their KV in host memory (benchmarks/kv_offloading.py).
They take the same turns without checks and with them; then the engine is left idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.agent_load import Load, ModelOption, percentiles
from benchmarks.command import JsonOption, print_report, run
from benchmarks.kv_offloading import Row, SkippingClock, drive
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.parts.kv_check.messages import KVCheckStats
from engine.wire.parts.kv_offload import KVOffloadStats

OVERCOMMIT = 5.0  # tokens of all contexts per token that fits the cache
IDLE_STEPS = 1000


@dataclass(frozen=True, slots=True)
class CheckCost:
    every: int
    checks: dict[str, dict[str, int]]
    check_tokens: int
    computed_tokens: int  #: by all steps
    loaded_tokens: int
    idle_tokens: int  #: by IDLE_STEPS steps afterwards
    first_token_s: list[float]


@dataclass(frozen=True, slots=True)
class CheckReport:
    load: Load
    costs: list[CheckCost]
    equal_answers: bool


def computed(core: EngineCore) -> int:
    return int(core.stats().histograms["iteration_tokens_total"].sum)


def measure(model: str, load: Load, every: list[int]) -> CheckReport:
    costs, answers = [], []
    for each in every:
        config = EngineConfig(
            model=model, num_threads=1, num_gpu_blocks_override=int(load.agents * load.longest / OVERCOMMIT) // 16,
            max_num_seqs=4, max_model_len=load.longest + load.tool, kv_offloading_size=1.0, kv_check_every=each,
        )  # fmt: skip
        clock = SkippingClock()
        core = build_engine(config, clock=Clock(clock.monotonic))
        result = drive(core, load, Row("host", "host"), clock)
        busy = computed(core)
        for _ in range(IDLE_STEPS):
            core.step()
        stats, tiers = core.stats().record(KVCheckStats), core.stats().record(KVOffloadStats)
        assert tiers is not None
        checks, tokens = ({}, 0) if stats is None else (stats.checks, stats.tokens)
        idle = computed(core) - busy
        costs.append(CheckCost(each, checks, tokens, busy, tiers.hit_tokens, idle, result.first_token_s))
        answers.append(result.answers)
        core.close()
    return CheckReport(load, costs, all(each == answers[0] for each in answers))


def show_report(report: CheckReport) -> None:
    columns = ("checks", "their tokens", "tokens computed", "share", "loaded", "idle", "first token P50 ms", "P99 ms")
    table = make_table("kv_check_every", *columns)
    for cost in report.costs:
        p50, p99 = percentiles(cost.first_token_s)
        table.add_row(
            str(cost.every),
            ", ".join(f"{count} {result}" for results in cost.checks.values() for result, count in results.items()),
            str(cost.check_tokens),
            str(cost.computed_tokens),
            f"{cost.check_tokens / cost.computed_tokens:.2%}",
            str(cost.loaded_tokens),
            str(cost.idle_tokens),
            figure(1000 * p50, 1),
            figure(1000 * p99, 1),
        )
    print(f"{report.load}; idle: tokens computed in {IDLE_STEPS} steps without requests")
    show(table)
    print(f"answers {'equal' if report.equal_answers else 'DIFFERENT'}")


def main(
    model: ModelOption = "pocket",
    agents: int = 20,
    turns: int = 10,
    every: Annotated[list[int] | None, typer.Option(help="kv_check_every of a row. Default: 0 and 200.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure how many tokens checks of cached KV take, and how much later first tokens come."""
    print_report(measure(model, Load(agents, turns, 400, 80, 24), every or [0, 200]), json_output, show_report)


if __name__ == "__main__":
    run(main)

"""The agents of benchmarks.kv_offloading with holds and without, with a tier and without: `python -m benchmarks.holds`.

With holds, each turn asks that its prompt stays cached for five minutes, which is longer than any pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from benchmarks.kv_offloading import OffloadReport, Row, TierResult, Turns, measure, show_report
from cluster.terminal.tables import figure
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark, PromptHold
from engine.wire.token_delta import TokenDelta

HELD_S = 300.0


@dataclass(slots=True)
class Promises(Turns):
    """Holds that the agents were granted."""

    held: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Tokens and end of each agent's newest hold."""
    kept: int = 0
    """Turns that came in time and found all that was promised."""
    broken: int = 0
    first_token_s: list[float] = field(default_factory=list)
    """Of turns that came in time."""

    def asked(self, request: GenerateRequest) -> GenerateRequest:
        return request.asking(PromptHold(marks=[HoldMark(len(request.prompt), HELD_S)]))

    def answered(self, agent: int, at: float, deltas: Sequence[TokenDelta], first_token_s: float) -> None:
        hit = sum(delta.num_cached_tokens for delta in deltas)
        tokens, until = self.held.pop(agent, (0, 0.0))
        if tokens and at < until:
            self.kept += hit >= tokens
            self.broken += hit < tokens
            self.first_token_s.append(first_token_s)
        outcomes = [outcome for delta in deltas for outcome in delta.records(HoldOutcome)]
        if granted := sum(outcome.tokens for outcome in outcomes if outcome.refusal is None):
            self.held[agent] = granted, at + HELD_S


ROWS = (
    Row("none", "none"),
    Row("holds", "none", Promises),
    Row("host", "host"),
    Row("host + holds", "host", Promises),
)


def cells_of(outcome: TierResult) -> Sequence[str]:
    promises = outcome.turns
    if not isinstance(promises, Promises) or not promises.first_token_s:
        return "", "", "", ""
    p50, p99 = (figure(1000 * each, 1) for each in percentiles(promises.first_token_s))
    return f"{len(promises.first_token_s) / len(outcome.first_token_s):.0%}", p50, p99, str(promises.broken)


def show_holds(report: OffloadReport) -> None:
    show_report(report, ("held turns", "their P50 ms", "P99 ms", "broken"), cells_of)


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
    json_output: JsonOption = False,
) -> None:
    """Measure what agents with holds find cached when they come back, and how soon their first token comes."""
    report = measure(model, Load(agents, turns, first, tool, answer), overcommit, threads, block_size, ROWS)
    print_report(report, json_output, show_holds)


if __name__ == "__main__":
    run(main)

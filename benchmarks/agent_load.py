"""A plain load of agents: contexts that all grow by a tool's output and an answer with each turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

FirstOption = Annotated[int, typer.Option(help="Tokens of an agent's first prompt.")]
ToolOption = Annotated[int, typer.Option(help="Tokens that a tool adds.")]
AnswerOption = Annotated[int, typer.Option(help="Tokens of an answer.")]
ModelOption = Annotated[str, typer.Option(help="Model folder, or `pocket`.")]
OvercommitOption = Annotated[float, typer.Option(help="Tokens of all contexts per token that fits the cache.")]


@dataclass(frozen=True, slots=True)
class Load:
    agents: int
    turns: int
    first: int  #: tokens of an agent's first prompt
    tool: int  #: tokens that a tool adds
    answer: int  #: tokens

    @property
    def longest(self) -> int:
        return self.first + self.turns * (self.tool + self.answer)

    def __str__(self) -> str:
        return f"{self.agents} agents, {self.turns} turns each, contexts up to {self.longest} tokens"


def percentiles(times: Sequence[float]) -> tuple[float, float]:
    """Return P50 and P99."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]

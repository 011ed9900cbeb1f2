"""Interface of the scheduler's parts that limit how many tokens a request computes in a step."""

from __future__ import annotations

from typing import Protocol

from engine.core.request import Request


class TokenLimit(Protocol):
    """Lowers how many tokens a request computes in one step. It must let the first request in order make progress."""

    def start_step(self, sequences: int) -> None:
        """Begin to plan a step. sequences: number of running sequences."""

    def up_to(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request may be computed in this step."""

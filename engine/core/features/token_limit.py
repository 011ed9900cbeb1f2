"""What a part of the scheduler may have to say about how much is computed."""

from __future__ import annotations

from typing import Protocol

from engine.core.request import Request


class TokenLimit(Protocol):
    """Lowers how many tokens a request computes in one step. It never keeps the first in order from all progress."""

    def start_step(self, sequences: int) -> None:
        """Begin to plan a step. sequences: those that run."""

    def up_to(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request may be computed in this step."""

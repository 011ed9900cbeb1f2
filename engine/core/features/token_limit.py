"""Interface of the scheduler's parts that limit how many tokens a request computes in a step; and the part of an engine
with pipeline stages."""

from __future__ import annotations

from typing import Protocol

from engine.core.request import Request


class TokenLimit(Protocol):
    """Lowers how many tokens a request computes in one step. It must let the first request in order make progress."""

    def start_step(self, sequences: int) -> None:
        """Begin to plan a step. sequences: number of running ones."""

    def up_to(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request may be computed in this step."""


class MicroBatches:
    """Token limit of an engine with pipeline stages.

    A request whose next token a step under way samples waits for that token. A step computes at most 1 / stages of the
    running requests, so that the others fill the steps that follow, and every stage has a step.
    """

    def __init__(self, stages: int):
        self._stages, self._left = stages, 1

    def start_step(self, sequences: int) -> None:
        self._left = max(1, -(-sequences // self._stages))

    def up_to(self, request: Request, count: int) -> int:
        if request.in_flight or count <= 0 or not self._left:
            return 0
        self._left -= 1
        return count

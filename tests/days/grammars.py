"""Grammars of a simulated engine. They take simulated time to compile."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine.wire.structured_outputs import StructuredOutputsParams
from tests.days.model import StepClock
from tests.fake_runner import FakeGrammar

QUICK_S, SLOW_S = 0.01, 2.0
DONE: Future[Any] = Future()
DONE.set_result(None)


@dataclass(frozen=True)
class Pending:
    output: list[int]
    ready_at: float
    compiled: Future[Any]

    def finished(self, now: float) -> bool:
        return now >= self.ready_at


class FakeCompiler:
    """Has the methods of GrammarCompiler."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def start(self, params: StructuredOutputsParams, output: list[int], now: float, client: str = "") -> Pending:
        return Pending(output, now + self._rng.choice([0.0, QUICK_S, self._rng.uniform(0, SLOW_S)]), DONE)

    def finish(self, pending: Pending) -> FakeGrammar:
        return FakeGrammar(pending.output)


class Pauses:
    """What an engine waits for while a grammar compiles: nothing ends its pauses early."""

    def __init__(self, clock: StepClock):
        self._clock = clock

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self._clock.lead += seconds

"""How adapters get into the slots of a simulated engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.lora.messages import AdapterLoad
from engine.wire.parts.adapter import ModelAdapter
from tests.days.model import origin_of

if TYPE_CHECKING:
    from tests.days.engine import Engine

LOAD_S, STALL_S = 0.05, 2.0  # of an adapter: longest time, and if its disk stalls
STALLS = 0.1  # share of the loads


class Loader:
    """Has the methods of GroupLoader that the courier calls."""

    def __init__(self, engine: Engine):
        self._engine, self._rng = engine, random.Random(engine.rng.getrandbits(64))
        self._num_loading = 0
        self._done: list[tuple[int, RequestError | None]] = []

    @property
    def loading(self) -> bool:
        return self._num_loading > 0

    @property
    def answered(self) -> bool:
        return bool(self._done)

    def load(self, command: AdapterLoad) -> None:
        self._num_loading += 1
        seconds = self._rng.uniform(0, STALL_S if self._rng.random() < STALLS else LOAD_S)
        self._engine.outbox.append(lambda: self._later(seconds, lambda: self._end(command)))

    def finished(self) -> list[tuple[int, RequestError | None]]:
        done, self._done = self._done, []
        self._num_loading -= len(done)
        return done

    def check(self, lora: ModelAdapter) -> None:
        pass

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function, unless the engine has died. It waits while the engine is paused."""

        def go_on() -> None:
            if self._engine.alive:
                if self._engine.paused:
                    self._later(0.05, call)
                else:
                    call()

        self._engine.loop.call_later(seconds, go_on)

    def _end(self, command: AdapterLoad) -> None:
        self._engine.runner.load_adapter(command.slot, origin_of(command.lora))
        self._engine.cluster.seen["adapter loaded"] += 1
        self._done.append((command.number, None))
        self._engine.wake()

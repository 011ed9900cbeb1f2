"""An engine with a real model, driven step by step."""

from __future__ import annotations

from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta


class FakeClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Engine:
    """A core, the deltas that came out of it, and a clock of its own."""

    def __init__(self, core: EngineCore, clock: FakeClock):
        self.core, self.clock = core, clock
        self.deltas: dict[str, list[TokenDelta]] = {}

    def add(self, name: str, prompt: list[int] | None = None, *, timeout_s: float | None = None, **params) -> None:
        settings = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params}
        message = GenerateRequest(
            request_id=name,
            prompt=prompt or [5, 6, 7, 8, 9],
            params=SamplingParams(**settings),
            timeout_s=timeout_s,
        )
        self.core.add(message)
        self.deltas[name] = []

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, events: list[Event]) -> None:
        self.core.scheduler.check()
        for event in events:
            deltas = self.deltas[event.delta.request_id]
            assert not any(delta.finish_reason for delta in deltas), "a delta after the last one"
            deltas.append(event.delta)

    def abort(self, name: str) -> None:
        self.record(self.core.abort(name))

    def go(self) -> None:
        while self.core.has_work:
            self.step()
        assert all(deltas[-1].finish_reason for deltas in self.deltas.values())
        assert self.core.stats().blocks_used == 0

    def answer(self, name: str, *args, **params) -> list[int]:
        """Compute a request, and all others, and return its tokens."""
        self.add(name, *args, **params)
        self.go()
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def last(self, name: str) -> TokenDelta:
        return self.deltas[name][-1]

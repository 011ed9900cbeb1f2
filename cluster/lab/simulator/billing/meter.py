"""What the engines of a simulated or recorded cluster spend their time on."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import Event
from engine.core.request import Request
from engine.costs.block_usage import observe_usage
from engine.costs.step_cost import StepTimes, StepWork
from engine.parts.costs.cost_ledger import CostLedger, CostLine
from engine.wire.parts.costs import SequenceCost
from engine.wire.plan import StepPlan

ONE_TOKEN_EACH = StepPlan(step=0, added=[], blocks=[], slots=[], starts=[], counts=[], samples=[])


class NoMeter:
    """The meter of an engine whose costs nobody asks for. Times are seconds on the engine's clock."""

    def resume(self, now: float) -> None:
        """Record that the engine has work again, if it had none."""

    def rest(self, line: CostLine) -> None:
        """Record that the engine computes nothing until `resume`. line: what that time is spent on."""

    def step(self, plan: StepPlan, requests: list[Request], began_at: float, ended_at: float) -> None:
        """Charge a step to its requests. Call it before the scheduler commits the step."""

    def decodes(self, requests: list[Request], began_at: float, ended_at: float) -> None:
        """Charge a row of steps in which each of these requests decodes one token."""

    def report(self, events: list[Event]) -> None:
        """Close the accounts of requests that have ended."""

    def stop(self, now: float) -> None:
        """Account for the time until the engine ends, or until the end of what is measured."""


class EngineMeter(NoMeter):
    """The ledger of a real engine, and how much of it prompts have cost."""

    def __init__(self, times: StepTimes, kv_cache: KVCacheManager, block_bytes: Sequence[int], now: float):
        """times: step times that the engine learns. block_bytes: bytes of a block of each KV cache group."""
        self.ledger = CostLedger(times, observe_usage(kv_cache), block_bytes, now)
        self.kv_gib_s = 0.0  # of requests that have ended, and of prompts that other engines have read
        self._prompt_ns = 0
        self._first: list[Request] = []  # that get their first token in the newest step
        self._resting: CostLine | None = "idle"

    @property
    def prompt_ns(self) -> int:
        """Time that steps have spent on prompts, up to the first tokens."""
        self._end_prompts()
        return self._prompt_ns

    def resume(self, now: float) -> None:
        if self._resting is not None:
            self.ledger.spent(self._resting, now)
            self._resting = None

    def rest(self, line: CostLine) -> None:
        self._resting = line

    def step(self, plan: StepPlan, requests: list[Request], began_at: float, ended_at: float) -> None:
        self._end_prompts()
        self.ledger.step(StepWork.of(plan), plan, requests, began_at, ended_at)
        pairs = zip(requests, plan.samples, strict=True)
        self._first = [request for request, samples in pairs if samples and not request.num_output]

    def decodes(self, requests: list[Request], began_at: float, ended_at: float) -> None:
        self._end_prompts()
        self.ledger.step(StepWork(len(requests), 0, 0), ONE_TOKEN_EACH, [*requests], began_at, ended_at)

    def report(self, events: list[Event]) -> None:
        for event in self.ledger.report([*events]):
            reason = event.delta.finish_reason
            if reason == "length" if event.request.asked_by else reason is not None:
                self.kv_gib_s += sum(cost.kv_gib_s for cost in event.delta.records(SequenceCost))

    def stop(self, now: float) -> None:
        self.ledger.spent(self._resting or "overhead", now)

    def _end_prompts(self) -> None:
        """Count what the requests with new first tokens have cost until then."""
        self._prompt_ns += sum(self.ledger.of(request) for request in self._first)
        self._first = []

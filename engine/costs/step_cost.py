"""Cost of an engine's steps, learned as it runs. Pure Python: no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.core.loop_observer import EndedStep, LoopObserver
from engine.costs.draft_cost import DraftCost, StepMean, line_through
from engine.wire.plan import StepPlan

STEP_MEMORY = 200_000.0  # tokens after which a step's weight is 1/e
PROMPT_MEMORY = 50_000.0  # prompt tokens after which a prompt token's weight is 1/e
WARM_UP_STEPS = 4  # not recorded: they compile kernels and touch memory for the first time


class LinearCost:
    """Linear model seconds = fixed + slope * units, fitted by least squares to fading observations. Neither coefficient
    is negative."""

    def __init__(self, memory: float, prior_s: float = 0.0):
        """memory: total weight of later observations after which an observation's own weight has faded to 1/e.
        prior_s: value of `fixed` before the first observation."""
        self._memory, self._prior_s = memory, prior_s
        self._n = self._w = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, units: float, seconds: float, weight: float = 1.0) -> None:
        self._fade(math.exp(-weight / self._memory))
        self._n += 1.0
        self._w += weight
        self._x += weight * units
        self._y += weight * seconds
        self._xx += weight * units * units
        self._xy += weight * units * seconds

    def forget(self, fraction: float) -> None:
        self._fade(1.0 - fraction)

    @property
    def coefficients(self) -> tuple[float, float]:
        """Fitted (fixed, slope)."""
        if self._n < 0.5:
            return self._prior_s, 0.0
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        if variance <= 1e-9 * mean_x * mean_x:
            return mean_y, 0.0
        slope = max(0.0, (self._xy / self._w - mean_x * mean_y) / variance)
        if slope * mean_x > mean_y:  # the line would start below zero: force it through the origin
            return 0.0, self._xy / self._xx
        return mean_y - slope * mean_x, slope

    def of(self, units: float) -> float:
        fixed, slope = self.coefficients
        return fixed + slope * units

    def _fade(self, factor: float) -> None:
        self._n, self._w = self._n * factor, self._w * factor
        self._x, self._y = self._x * factor, self._y * factor
        self._xx, self._xy = self._xx * factor, self._xy * factor


class StepCost(LinearCost):
    """Cost of a step by its number of tokens. That number is also the weight of an observation: one long prompt chunk
    says more about the cost per token than many small decode steps."""

    def __init__(self) -> None:
        super().__init__(STEP_MEMORY)

    def observe_step(self, tokens: int, seconds: float) -> None:
        self.observe(tokens, seconds, weight=tokens)


class DecodeCost:
    """Cost of a step in which every sequence decodes one token, by the number of sequences.

    The costs of 1, 2 to 3, 4 to 7 sequences and so on are kept separately, each until it is observed again: hours of
    constant load must not erase what was learned about other sizes.
    """

    def __init__(self) -> None:
        self._means: dict[int, StepMean] = {}

    def observe_step(self, sequences: int, seconds: float) -> None:
        self._means.setdefault(sequences.bit_length(), StepMean()).add(sequences, seconds)

    @property
    def coefficients(self) -> tuple[float, float]:
        """(seconds per step, additional seconds per sequence); zeros before the first observation.

        While only one size is known, half of its time is attributed to its sequences.
        """
        if len(self._means) == 1:
            (only,) = self._means.values()
            return only.seconds / 2, only.seconds / 2 / only.tokens
        return line_through(list(self._means.values())) if self._means else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepWork:
    """Decodes and prefills of one step."""

    decodes: int
    """Sequences that computed one known token and sampled the next."""
    prefill_tokens: int
    """Tokens of all other sequences."""
    prefills: int
    """Those other sequences that sampled, since the step completed their prompt."""
    drafts: int = 0
    """Draft tokens that the decodes also verified."""
    num_drafts: int = 0
    """Tokens that a draft model proposed for each sequence."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        ended = sum(plan.samples)
        tokens = plan.num_tokens
        if tokens == ended == len(plan.counts):
            return cls(ended, 0, 0, 0, plan.num_drafts)
        decodes = list(zip(plan.counts, plan.samples, strict=True)).count((1, True)) + len(plan.drafts)
        drafts = sum(map(len, plan.drafts.values()))
        return cls(decodes, tokens - decodes - drafts, ended - decodes, drafts, plan.num_drafts)


class StepTimes(LoopObserver):
    """Learned costs of an engine's steps, and totals of its prefills (see StepWork)."""

    def __init__(self) -> None:
        #: Cost of all steps.
        self.by_tokens = StepCost()
        #: Cost of steps that only decode.
        self.by_sequences = DecodeCost()
        #: Cost of the same steps, with the share that drafts take.
        self.drafting = DraftCost()
        self.prefill_tokens = self.prefills = 0
        self._steps = 0
        self._prompt_s = self._prompt_tokens = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Recent engine-seconds per prompt token, fixed costs included; 0 while unknown.

        This is a ratio, not a fit: prompt chunks all have about the same size, so no slope can be fitted to them.
        """
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def compute_s(self, tokens: int) -> float | None:
        """Return what computing so many tokens of prompts is expected to take, in seconds; None while unknown."""
        rate = self.prompt_token_s
        return rate * tokens if rate else None

    def stepped(self, step: EndedStep) -> None:
        self.observe_step(StepWork.of(step.plan), step.ended_at - step.began_at, step.result.draft_s)

    def stats(self) -> dict[str, Any]:
        per_step, per_token = self.by_tokens.coefficients
        decode_per_step, decode_per_sequence = self.by_sequences.coefficients
        return {
            "seconds_per_step": per_step,
            "seconds_per_token": per_token,
            "decode_seconds_per_step": decode_per_step,
            "decode_seconds_per_sequence": decode_per_sequence,
            "prompt_seconds_per_token": self.prompt_token_s,
            "prefill_tokens": self.prefill_tokens,
            "prefills": self.prefills,
        }

    def observe_decodes(self, sequences: int, seconds: float, steps: int) -> None:
        """Record steps in which as many sequences decode one token each. seconds: of one step."""
        self._steps += steps
        if (steps := min(steps, self._steps - WARM_UP_STEPS)) > 0:
            self.by_tokens.observe(sequences, seconds, weight=sequences * steps)
            self.by_sequences.observe_step(sequences, seconds)

    def observe_step(self, work: StepWork, seconds: float, draft_s: float = 0.0) -> None:
        """Record a step that took `seconds`, of which the drafter with weights took `draft_s`."""
        self._steps += 1
        self.prefill_tokens += work.prefill_tokens
        self.prefills += work.prefills
        if self._steps <= WARM_UP_STEPS:
            return
        self.by_tokens.observe_step(work.decodes + work.drafts + work.prefill_tokens, seconds)
        if not work.prefill_tokens:
            self.by_sequences.observe_step(work.decodes, seconds)
            self.drafting.observe_step(work.decodes, work.drafts, work.num_drafts, seconds, draft_s)
            return
        per_step, per_sequence = self.by_sequences.coefficients if work.decodes else (0.0, 0.0)
        fade = math.exp(-work.prefill_tokens / PROMPT_MEMORY)
        self._prompt_s = self._prompt_s * fade + max(0.0, seconds - per_step - per_sequence * work.decodes)
        self._prompt_tokens = self._prompt_tokens * fade + work.prefill_tokens

"""What the steps of an engine cost, learned as it runs. Pure Python: no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.wire.plan import StepPlan

STEP_MEMORY = 200_000.0  # tokens after which a step counts 1/e
PROMPT_MEMORY = 50_000.0  # prompt tokens after which one counts 1/e
DECODE_MEMORY = 200.0  # steps of about the same size after which one counts 1/e
WARM_UP_STEPS = 4  # that compile kernels and touch memory for the first time: they say nothing of what a step costs


class LinearCost:
    """seconds = fixed + slope * units, by least squares over observations that fade. Neither part is ever negative."""

    def __init__(self, memory: float, prior_s: float = 0.0):
        """memory: weight of newer observations after which one counts 1/e. prior_s: what holds without any."""
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

    def forget(self, share: float) -> None:
        self._fade(1.0 - share)

    @property
    def coefficients(self) -> tuple[float, float]:
        """(fixed, slope)"""
        if self._n < 0.5:
            return self._prior_s, 0.0
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        if variance <= 1e-9 * mean_x * mean_x:
            return mean_y, 0.0
        slope = max(0.0, (self._xy / self._w - mean_x * mean_y) / variance)
        if slope * mean_x > mean_y:  # the line would meet zero on its way: it starts there
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
    """What a step of this engine costs, by its tokens. Weighted by them: a long prompt chunk says more about the cost
    of a token than many steps of a few decodes."""

    def __init__(self) -> None:
        super().__init__(STEP_MEMORY)

    def stepped(self, tokens: int, seconds: float) -> None:
        self.observe(tokens, seconds, weight=tokens)


@dataclass(slots=True)
class _Bucket:
    """Means over decode steps of about the same size."""

    count: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        self.count = min(self.count + 1, DECODE_MEMORY)
        self.sequences += (sequences - self.sequences) / self.count
        self.seconds += (seconds - self.seconds) / self.count


class DecodeCost:
    """What a step costs in which every sequence computes one token, by their number.

    Sizes of 1, 2 to 3, 4 to 7 and so on are remembered apart, each until it comes again: a load that stays the same for
    hours must not wash out what was learned of others.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def stepped(self, sequences: int, seconds: float) -> None:
        self._buckets.setdefault(sequences.bit_length(), _Bucket()).add(sequences, seconds)

    @property
    def coefficients(self) -> tuple[float, float]:
        """(seconds of any step, seconds more per sequence); zeros while nothing is known.

        With one size known, half of its time is taken to be due to its sequences.
        """
        if len(self._buckets) == 1:
            (only,) = self._buckets.values()
            return only.seconds / 2, only.seconds / 2 / only.sequences
        line = LinearCost(memory=math.inf)
        for bucket in self._buckets.values():
            line.observe(bucket.sequences, bucket.seconds, weight=bucket.count)
        return line.coefficients


@dataclass(frozen=True, slots=True)
class StepWork:
    """decodes: sequences that computed one token, and sampled. prefill_tokens: all others' tokens. prefills: sequences
    of those that sampled, since their prompt was computed to its end."""

    decodes: int
    prefill_tokens: int
    prefills: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        decodes = prefills = 0
        for count, samples in zip(plan.counts, plan.samples, strict=True):
            decodes += samples and count == 1
            prefills += samples and count > 1
        return cls(decodes, plan.num_tokens - decodes, prefills)


class StepTimes:
    """by_tokens: of all steps. by_sequences: of those that only decode.
    prefill_tokens, prefills: computed so far; see StepWork."""

    def __init__(self) -> None:
        self.by_tokens, self.by_sequences = StepCost(), DecodeCost()
        self.prefill_tokens = self.prefills = 0
        self._steps = 0
        self._prompt_s = self._prompt_tokens = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Engine-seconds that a prompt token has cost of late, all told; 0 while that is not known.

        A ratio and no fit: prompts come in chunks of about one size, which tell nothing of a slope.
        """
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def stepped(self, work: StepWork, seconds: float) -> None:
        self._steps += 1
        self.prefill_tokens += work.prefill_tokens
        self.prefills += work.prefills
        if self._steps <= WARM_UP_STEPS:
            return
        self.by_tokens.stepped(work.decodes + work.prefill_tokens, seconds)
        if not work.prefill_tokens:
            self.by_sequences.stepped(work.decodes, seconds)
            return
        per_step, per_sequence = self.by_sequences.coefficients if work.decodes else (0.0, 0.0)
        fade = math.exp(-work.prefill_tokens / PROMPT_MEMORY)
        self._prompt_s = self._prompt_s * fade + max(0.0, seconds - per_step - per_sequence * work.decodes)
        self._prompt_tokens = self._prompt_tokens * fade + work.prefill_tokens

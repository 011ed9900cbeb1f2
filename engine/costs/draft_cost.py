"""Cost of verifying drafts, and of proposing drafts with weights, learned from an engine's steps. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 200.0  # steps of about the same size after which a step's weight is 1/e
TRUSTED_STEPS = 8.0  # measured steps, of sizes other than the commonest, with which half of the slope is used
FIT_EVERY = 8  # steps


@dataclass(slots=True)
class StepMean:
    """Mean over recent steps of about the same size."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.count
        self.seconds += (seconds - self.seconds) / self.count


UNKNOWN = StepMean()


def line_through(means: list[StepMean]) -> tuple[float, float]:
    """Return (fixed, slope) of the line `seconds = fixed + slope * tokens`, fitted by least squares. Neither is
    negative."""
    count = sum(mean.count for mean in means)
    tokens = sum(mean.count * mean.tokens for mean in means) / count
    seconds = sum(mean.count * mean.seconds for mean in means) / count
    variance = sum(mean.count * (mean.tokens - tokens) ** 2 for mean in means)
    slope = sum(mean.count * (mean.tokens - tokens) * (mean.seconds - seconds) for mean in means) / (variance or 1.0)
    slope = min(max(0.0, slope), seconds / tokens)
    return seconds - slope * tokens, slope


class VerifyingCost:
    """Cost of a step that only decodes, by its number of tokens, drafts included.

    Steps of similar size form a group; there are four groups between a size and its double. A group keeps its cost
    until one of its steps is measured again. The first step of a group is ignored, since it may record a CUDA
    graph.
    """

    def __init__(self) -> None:
        self._means: dict[int, StepMean] = {}
        self._observed, self._fitted = 0, (0, (0.0, 0.0))

    def observe_step(self, tokens: int, seconds: float) -> None:
        size = math.floor(4 * math.log2(tokens))
        if size in self._means:
            self._means[size].add(tokens, seconds)
            self._observed += 1
        else:
            self._means[size] = StepMean()

    @property
    def coefficients(self) -> tuple[float, float]:
        """(seconds per step, additional seconds per token); zeros before the first observation.

        While few steps have been measured, the slope is set lower than measured. So tokens seem cheap, and more of them
        are tried.
        """
        if self._fitted[0] * FIT_EVERY <= self._observed:  # rarely true: this runs in every step
            self._fitted = self._observed // FIT_EVERY + 1, self._fit()
        return self._fitted[1]

    def _fit(self) -> tuple[float, float]:
        means = [mean for mean in self._means.values() if mean.count]
        if not means:
            return 0.0, 0.0
        fixed, slope = line_through(means)
        counts = [mean.count for mean in means]
        others = sum(counts) - max(counts)
        return fixed, slope * others / (others + TRUSTED_STEPS)


class ProposalCost:
    """Cost of the proposals of a drafter with weights, by the number of sequences: 1, 2 to 3, 4 to 7 and so on.

    Steps without proposals are measured too, because some drafters compute something for every token of the target.
    """

    def __init__(self) -> None:
        self._idle: dict[int, StepMean] = {}
        self._busy: dict[int, StepMean] = {}

    def observe_step(self, sequences: int, tokens: int, seconds: float) -> None:
        """Record a step. tokens: number proposed for each sequence. The first step of a size that proposes tokens is
        ignored, because the drafter may first have to catch up with the sequences."""
        means, size = self._busy if tokens else self._idle, sequences.bit_length()
        if tokens and size not in means:
            means[size] = StepMean()
        else:
            means.setdefault(size, StepMean()).add(tokens, seconds)

    def of(self, sequences: int) -> tuple[float, float]:
        """Return the drafter's seconds in a step without proposals, and its additional seconds to propose one token for
        each of these sequences. Both come from the nearest measured number of sequences; they are 0 if nothing was
        measured."""
        size = sequences.bit_length()
        idle, busy = self._nearest(self._idle, size), self._nearest(self._busy, size)
        return idle.seconds, max(0.0, busy.seconds - idle.seconds) / busy.tokens if busy.count else 0.0

    def _nearest(self, means: dict[int, StepMean], size: int) -> StepMean:
        if (mean := means.get(size, UNKNOWN)).count or not means:  # fast path: this runs in every step
            return mean
        known = [other for other, mean in means.items() if mean.count]
        return means[min(known, key=lambda other: abs(other - size))] if known else UNKNOWN


class DraftCost:
    def __init__(self) -> None:
        self._verifying, self._proposals = VerifyingCost(), ProposalCost()

    def observe_step(self, sequences: int, drafts: int, proposed: int, seconds: float, proposing_s: float) -> None:
        """Record a step that only decodes. drafts: verified drafts, in all. proposed: tokens proposed per sequence.
        proposing_s: seconds of the step that the drafter took."""
        self._verifying.observe_step(sequences + drafts, seconds - proposing_s)
        self._proposals.observe_step(sequences, proposed, proposing_s)

    def of(self, sequences: int) -> tuple[float, float, float]:
        """Return three costs in seconds: of a step, of each token in it, and of each token proposed for this many
        sequences."""
        (fixed, slope), (idle, proposal) = self._verifying.coefficients, self._proposals.of(sequences)
        return fixed + idle, slope, proposal

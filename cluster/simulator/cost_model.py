"""What a step of an engine takes, by the work in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from engine.wire.plan import StepPlan


class Work(NamedTuple):
    """Of one step. tokens: that are computed. sequences: that they belong to. pairs: of a computed token and one that
    it attends to, itself included. context: tokens whose KV is read, once for each sequence."""

    tokens: int
    sequences: int
    pairs: int
    context: int

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        pairs = context = 0
        for start, count in zip(plan.starts, plan.counts, strict=True):
            pairs += count * start + count * (count + 1) // 2
            context += start + count
        return cls(sum(plan.counts), len(plan.counts), pairs, context)


class CostModel(Protocol):
    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        """For the fields of a Work; apart, since it is asked for every step."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step computes, or waits for memory, whichever takes longer (Williams et al. 2009); and some cost is fixed.

    step_s, sequence_s: fixed, per step and per sequence (planning, sampling, launching kernels).
    token_s, pair_s: of computing, per token and per attended pair. weights_s: to read them all, once per step.
    context_s: to read the KV of a token.
    """

    step_s: float
    sequence_s: float
    token_s: float
    pair_s: float
    weights_s: float
    context_s: float

    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        compute = self.token_s * tokens + self.pair_s * pairs
        memory = self.weights_s + self.context_s * context
        return self.step_s + self.sequence_s * sequences + (compute if compute > memory else memory)


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A sum of terms, as measured on an engine (`fit`): what fits where no peak rate is known, a CPU above all."""

    step_s: float
    token_s: float
    sequence_s: float
    pair_s: float
    context_s: float

    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        return (
            self.step_s
            + self.token_s * tokens
            + self.sequence_s * sequences
            + self.pair_s * pairs
            + self.context_s * context
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """error: median of |predicted - measured| / measured over the steps; p90_error: its 90th percentile."""

    cost: LinearCostModel
    steps: int
    error: float
    p90_error: float


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Fit:
    """Least squares of the relative error, no part negative; then scaled, so that all steps together take as long as
    they took.

    Relative, because a step of a long prompt takes a hundred times as long as one that decodes, and both matter.
    Scaled, because steps that were held up count for little in that, and yet requests waited for them.
    """
    if len(works) != len(seconds) or len(works) < len(Work._fields) + 1:
        raise ValueError(f"{len(works)} steps with {len(seconds)} times are too few to fit a cost")
    measured = np.asarray(seconds, dtype=np.float64)
    features = np.column_stack([np.ones(len(works)), np.asarray(works, dtype=np.float64)])
    coefficients = non_negative(features / measured[:, None])
    coefficients *= measured.sum() / (features @ coefficients).sum()
    predicted = features @ coefficients
    errors = np.abs(predicted - measured) / measured
    return Fit(
        LinearCostModel(*coefficients.tolist()),
        len(works),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
    )


def non_negative(features: np.ndarray) -> np.ndarray:
    """Coefficients of least squares to 1. Whatever comes out most negative is left out, until nothing is: for five
    features that is as good as a solver, and they need not be scaled."""
    scale = np.linalg.norm(features, axis=0)
    kept = [i for i in range(features.shape[1]) if scale[i] > 0]
    while True:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(features)), rcond=None)[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        del kept[int(found.argmin())]
    coefficients = np.zeros(features.shape[1])
    coefficients[kept] = np.maximum(found, 0) / scale[kept]
    return coefficients

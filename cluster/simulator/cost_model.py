"""The time that a step of an engine takes, by the work in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from engine.errors import InvalidParameter
from engine.wire.plan import StepPlan


class Work(NamedTuple):
    """The work of one step."""

    tokens: int  #: computed tokens
    sequences: int  #: sequences that they belong to
    pairs: int  #: computed tokens, each times the tokens that it attends to, itself included
    context: int  #: tokens whose KV is read, once for each sequence

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        pairs = context = 0
        for start, count in zip(plan.starts, plan.counts, strict=True):
            pairs += count * start + count * (count + 1) // 2
            context += start + count
        return cls(sum(plan.counts), len(plan.counts), pairs, context)


class CostModel(Protocol):
    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        """Return the time of a step. The fields of a Work come apart, since this is called for every step."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step computes, or waits for memory, whichever takes longer (Williams et al. 2009); and some cost is fixed."""

    step_s: float  #: per step: planning, launching kernels
    sequence_s: float  #: per sequence: planning, sampling
    token_s: float  #: computing a token
    pair_s: float  #: computing an attended pair
    weights_s: float  #: reading all weights, once per step
    context_s: float  #: reading the KV of a token

    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        compute = self.token_s * tokens + self.pair_s * pairs
        memory = self.weights_s + self.context_s * context
        return self.step_s + self.sequence_s * sequences + (compute if compute > memory else memory)


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A sum of terms, measured on an engine: for where no peak rate is known, a CPU above all."""

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
class Measured:
    """A cost file."""

    cost: LinearCostModel
    request_s: float | None = None  #: of the time to the first token, what is not steps; None: not measured


def read_cost(path: Path) -> Measured:
    """Raises InvalidParameter."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        limit = f"a file that `python -m benchmarks.simulator.fit` wrote ({error})"
        raise InvalidParameter("--cost", str(path), limit) from None

"""Samples tokens from logits.

Randomness is a function of (seed, position) alone: one number from a counter-based generator (Philox, Salmon et
al. 2011) picks the token by inverting the cumulative distribution, so equal logits give equal tokens. A request thus
gets the same tokens in any batch, after preemption, and when it is run again elsewhere, provided that its logits have
the same bits there: docs/http_api.md lists the dtypes and devices where this holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.ops.argmax import top_ids
from engine.model.ops.sampling import RandomRows
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob

DRAW_AHEAD = 32  # positions to draw numbers for at a time
MAX_SEEDS = 4096  # seeds whose numbers are kept, far more than there are running sequences
WORDS_PER_COUNTER = 4  # words that the generator makes for one counter; only the first is used

ToDevice = Callable[[NDArray[Any]], Tensor]
"""Copies an array to the device of the logits."""


class UniformSource:
    """Random numbers in [0, 1), as a function of (seed, position)."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        # seed -> first position, and the numbers of DRAW_AHEAD positions from there on
        self._ahead: dict[int, tuple[int, list[float]]] = {}

    def draw(self, seed: int, position: int) -> float:
        """Return the number for one position: 24 random bits, from key (seed, 0) and counter (position, 0, 0, 0)."""
        first, numbers = self._ahead.get(seed, (0, []))
        if not 0 <= position - first < len(numbers):
            first, numbers = position, self._draw(seed, position)
            if len(self._ahead) >= MAX_SEEDS:
                self._ahead.clear()
            self._ahead[seed] = first, numbers
        return numbers[position - first]

    def _draw(self, seed: int, position: int) -> list[float]:
        """Return the random numbers for DRAW_AHEAD positions from `position` on. Setting the generator takes 5 us,
        which is too slow for each token of a large batch."""
        state = self._philox.state
        state["state"]["key"][:] = (seed, 0)
        state["state"]["counter"][:] = (position, 0, 0, 0)
        state["buffer_pos"] = WORDS_PER_COUNTER  # no words left over from the previous draw
        self._philox.state = state
        words = self._philox.random_raw(WORDS_PER_COUNTER * DRAW_AHEAD)[::WORDS_PER_COUNTER]
        numbers: list[float] = ((words >> np.uint64(40)) * 2.0**-24).tolist()
        return numbers


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows of logits whose log-probabilities were requested."""

    rows: Tensor  #: [n] int64
    counts: dict[int, int]  #: alternatives to report, by row


@dataclass(slots=True)
class SamplingInputs:
    """Inputs of sampling for each row of logits, prepared on the host. Greedy rows need none."""

    random: list[RandomRows]
    logprobs: LogprobRows | None = None

    def again(self, uniform: list[float], to_device: ToDevice) -> SamplingInputs:
        """Return these inputs with new random numbers, one per row."""
        numbers = np.array(uniform, dtype=np.float32)
        random = [replace(group, uniform=to_device(numbers[group.index]).unsqueeze(1)) for group in self.random]
        return replace(self, random=random)


class SampledRow(NamedTuple):
    """A sequence whose next token is about to be sampled."""

    position: int  #: position of that token, which is the length of the sequence so far
    seed: int
    params: SamplingParams


def prepare_sampling(
    sequences: list[SampledRow], vocab_size: int, uniform: UniformSource, to_device: ToDevice = torch.from_numpy
) -> SamplingInputs:
    """Group rows by the work that they need."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if not sequence.params.greedy:
            groups.setdefault(candidate_width(sequence.params, vocab_size), []).append(row)

    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float32)).unsqueeze(1)

    random = []
    for width, rows in groups.items():
        chosen = [sequences[row] for row in rows]
        random.append(
            RandomRows(
                rows=to_device(np.array(rows, dtype=np.int64)),
                temperature=column([s.params.temperature for s in chosen]),
                uniform=column([uniform.draw(s.seed, s.position) for s in chosen]),
                top_p=column([s.params.top_p for s in chosen]),
                min_p=column([s.params.min_p for s in chosen]),
                width=width,
                index=rows,
            )
        )
    counts = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
    logprobs = LogprobRows(to_device(np.array(list(counts), dtype=np.int64)), counts) if counts else None
    return SamplingInputs(random, logprobs)


def candidate_width(params: SamplingParams, vocab_size: int) -> int:
    """Return how many candidates of a row have to be sorted. It depends on the request alone, never on the batch, so
    that sums always run in the same order."""
    if 0 < params.top_k < vocab_size:
        return params.top_k
    return vocab_size if params.top_p < 1.0 or params.min_p > 0.0 else 0


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log-probabilities of the chosen tokens and of the most likely ones, as tensors."""

    tokens: Tensor  #: [rows] int64, the chosen tokens
    logprobs: Tensor  #: [rows] float32
    ranks: Tensor  #: [rows] int64
    top_ids: Tensor  #: [rows, width] int64, the most likely tokens
    top_logprobs: Tensor  #: [rows, width] float32

    def columns(self) -> tuple[Tensor, ...]:
        return self.tokens, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def fetched(self, fetch: Callable[[Tensor], Tensor]) -> LogprobTable:
        return LogprobTable(*map(fetch, self.columns()))

    def rows(self, counts: list[int]) -> list[TokenLogprob]:
        """Return one entry per row, with counts[row] alternatives."""
        values = zip(*(column.tolist() for column in self.columns()), counts, strict=True)
        return [
            TokenLogprob(token, logprob, rank, list(zip(top_ids, top_logprobs, strict=True))[:count])
            for token, logprob, rank, top_ids, top_logprobs, count in values
        ]


def logprob_table(logits: Tensor, tokens: Tensor, width: int) -> LogprobTable:
    """Return the log-probabilities of `tokens` [rows] and of the `width` most likely ones, for logits [rows, vocab]."""
    logprobs, ids = logits.log_softmax(-1), top_ids(logits, width)
    ranks = (logits > logits.gather(1, tokens.unsqueeze(1))).sum(-1) + 1
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return LogprobTable(tokens, own, ranks, ids, logprobs.gather(1, ids))

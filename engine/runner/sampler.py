"""From logits to tokens.

Randomness is a function of (seed, position) alone: one number from a counter-based generator (Philox, Salmon et
al. 2011) picks the token by inverting the cumulative distribution. So a request gets the same tokens whatever it
is batched with, after preemption, and when it is run again elsewhere; and no noise is drawn over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.runner import logits_processors
from engine.runner.logits_processors import BatchEdits, LogitsEdits, RowEdits, ToDevice
from engine.wire.messages import TokenLogprob
from engine.wire.sampling_params import SamplingParams

CANDIDATES = 1024
DRAW_AHEAD = 32  # positions
MAX_SEEDS = 4096  # whose numbers are kept: far more than sequences that run
WORDS_PER_COUNTER = 4  # that the generator makes of one counter; the first is used


class UniformSource:
    """Numbers in [0, 1) as a function of (seed, position)."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._ahead: dict[
            int, tuple[int, list[float]]
        ] = {}  # seed -> numbers of DRAW_AHEAD positions, from the first on

    def draw(self, seed: int, position: int) -> float:
        """24 random bits as a float32 in [0, 1): key (seed, 0), counter (position, 0, 0, 0)."""
        first, numbers = self._ahead.get(seed, (0, []))
        if not 0 <= position - first < len(numbers):
            first, numbers = position, self._draw(seed, position)
            if len(self._ahead) >= MAX_SEEDS:
                self._ahead.clear()
            self._ahead[seed] = first, numbers
        return numbers[position - first]

    def _draw(self, seed: int, position: int) -> list[float]:
        """Numbers of DRAW_AHEAD positions: setting the generator takes 5 us, too long for every token of a large batch."""
        state = self._philox.state
        state["state"]["key"][:] = (seed, 0)
        state["state"]["counter"][:] = (position, 0, 0, 0)
        state["buffer_pos"] = WORDS_PER_COUNTER  # nothing left over from the draw before
        self._philox.state = state
        words = self._philox.random_raw(WORDS_PER_COUNTER * DRAW_AHEAD)[::WORDS_PER_COUNTER]
        numbers: list[float] = ((words >> np.uint64(40)) * 2.0**-24).tolist()
        return numbers


@dataclass(slots=True)
class RandomRows:
    """Rows that are sampled alike. rows [n] int64; temperature, uniform, top_p, min_p [n, 1] float32.

    width: how many candidates are looked at: top_k, or 0 for the whole vocabulary without any filter.
    """

    rows: Tensor
    temperature: Tensor
    uniform: Tensor
    top_p: Tensor
    min_p: Tensor
    width: int

    def row(self, index: int) -> RandomRows:
        """One of the rows."""
        one = slice(index, index + 1)
        return RandomRows(
            self.rows[one], self.temperature[one], self.uniform[one], self.top_p[one], self.min_p[one], self.width
        )


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows [n] int64 whose token must obey a grammar. allowed: [n, bytes] uint8, a bit for each token, lowest first."""

    rows: Tensor
    allowed: Tensor


@dataclass(slots=True)
class SamplingInputs:
    """What is to be done to each row of logits, prepared on the host. Greedy rows need nothing."""

    random: list[RandomRows]
    edits: BatchEdits | None
    logprobs: list[int | None]  # per row: number of alternatives to report
    masked: MaskedRows | None = None

    @property
    def any_logprobs(self) -> bool:
        return any(count is not None for count in self.logprobs)

    @property
    def plain(self) -> bool:
        """Every row takes its most likely token, and nothing else is asked for."""
        return not (self.random or self.edits or self.masked or self.any_logprobs)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A sequence about to get the token at `position` (= its length so far). edits: of its logits, if any."""

    slot: int
    position: int
    num_prompt: int
    seed: int
    params: SamplingParams
    edits: LogitsEdits | None = None


def prepare_sampling(
    sequences: list[SampledRow], vocab_size: int, uniform: UniformSource, to_device: ToDevice = torch.from_numpy
) -> SamplingInputs:
    """Sort the rows by what has to be done to them. Greedy rows without extras cost nothing later.

    to_device: brings an array to where the logits are.
    """
    groups: dict[int, list[int]] = {}
    edited = []
    for row, sequence in enumerate(sequences):
        if not sequence.params.greedy:
            groups.setdefault(candidate_width(sequence.params, vocab_size), []).append(row)
        if sequence.edits is not None:
            edited.append(RowEdits(row, sequence.slot, sequence.num_prompt, sequence.position, sequence.edits))

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
            )
        )
    edits = logits_processors.prepare(edited, vocab_size, to_device)
    return SamplingInputs(random, edits, [s.params.logprobs for s in sequences])


def candidate_width(params: SamplingParams, vocab_size: int) -> int:
    """Candidates that have to be sorted: 0 for none. A function of the request alone, never of its batch,
    so that sums run in the same order wherever it is computed."""
    if 0 < params.top_k < vocab_size:
        return params.top_k
    return vocab_size if params.top_p < 1.0 or params.min_p > 0.0 else 0


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Tokens [rows] int64 from logits [rows, vocab] float32; -1 where no finite logit is left."""
    best, tokens = logits.max(dim=-1)
    for group in inputs.random:
        chosen = logits[group.rows] / group.temperature.clamp(min=1e-2)  # vLLM's smallest temperature too
        tokens[group.rows] = draw_filtered(chosen, group) if group.width else draw_any(chosen, group.uniform)
    return mark_non_finite(best, tokens)


def mark_non_finite(best: Tensor, tokens: Tensor) -> Tensor:
    """-1 where the largest logit is not finite."""
    return torch.where(best.isfinite(), tokens, -1)


def draw_any(logits: Tensor, uniform: Tensor) -> Tensor:
    """From the whole vocabulary. logits: [rows, vocab], already divided by the temperature; uniform: [rows, 1].

    On a GPU torch sums in parallel, so that a sum may grow a little at a token of weight 0, and a banned one be drawn.
    Our kernel looks at the weights too.
    """
    if logits.is_cuda and dispatch.triton_found():
        from engine.model.ops.gpu import sampling

        return sampling.draw_any(logits, uniform)
    return draw(logits.softmax(-1), uniform)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [rows] with probability in proportion to weights [rows, n], given uniform [rows, 1] in [0, 1)."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # strictly below the total, so that rounding never picks a candidate of weight 0
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp(max=weights.shape[-1] - 1)  # only NaN weights get here; `sample` marks their rows


def draw_filtered(logits: Tensor, group: RandomRows) -> Tensor:
    """As `draw`, over what min_p, top_k and top_p leave, applied in that order (as vLLM does).

    logits: [rows, vocab], already divided by the temperature. Sorting a whole vocabulary takes milliseconds per row,
    so the CANDIDATES most likely tokens are tried first; a row whose nucleus reaches past them is sorted after all.
    On a GPU nothing is sorted (ops/gpu/sampling.py), or without Triton every row: to look which ones must be would make
    the host wait for the step.
    """
    vocab_size = logits.shape[-1]
    if logits.is_cuda and dispatch.triton_found():
        from engine.model.ops.gpu import sampling

        return sampling.draw_filtered(logits, group.uniform, group.top_p, group.min_p, group.width)
    if group.width < vocab_size:  # top_k: what is beyond it does not count
        values, ids = logits.topk(group.width, dim=-1)
        weights = relative_weights(values, values[:, :1], group.min_p)
        return draw_nucleus(weights, ids, weights.sum(-1, keepdim=True), group)
    if logits.is_cuda:
        return draw_sorted(logits, group)
    values, ids = logits.topk(min(CANDIDATES, vocab_size), dim=-1)
    weights = relative_weights(values, values[:, :1], group.min_p)
    total = relative_weights(logits, values[:, :1], group.min_p).sum(-1, keepdim=True)
    tokens = draw_nucleus(weights, ids, total, group)
    reaches_past = (weights[:, -1:] > 0) & (weights.sum(-1, keepdim=True) < group.top_p * total)
    for row in reaches_past.squeeze(1).nonzero().flatten().tolist():
        tokens[row] = draw_sorted(logits[row : row + 1], group.row(row))
    return tokens


def draw_sorted(logits: Tensor, group: RandomRows) -> Tensor:
    """The plain twin of `draw_filtered` for rows without top_k."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = relative_weights(values, values[:, :1], group.min_p)
    return draw_nucleus(weights, ids, weights.sum(-1, keepdim=True), group)


def relative_weights(logits: Tensor, best: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities relative to the most likely token's, which is what min_p compares; 0 for those below it."""
    weights = (logits - best).exp()
    return torch.where(weights >= min_p, weights, 0.0)


def draw_nucleus(weights: Tensor, ids: Tensor, total: Tensor, group: RandomRows) -> Tensor:
    """Draw from the first of `weights` [rows, n], most likely first, that reach top_p of `total` [rows, 1] together."""
    before = weights.cumsum(-1) - weights
    # the most likely token always stays, even where top_p is 0 in float32
    nucleus = group.top_p.clamp(min=1e-30) * total
    weights = torch.where((before < nucleus) | (group.top_p >= 1.0), weights, 0.0)
    return ids.gather(1, draw(weights, group.uniform).unsqueeze(1)).squeeze(1)


def process_rows(logits: Tensor, inputs: SamplingInputs, history: Tensor) -> None:
    """Apply grammars, then logits processors, in place. history: [slots, max_model_len] int32 token ids."""
    if inputs.masked is not None:
        apply_masks(logits, inputs.masked)
    if inputs.edits is not None:
        logits_processors.apply(logits, inputs.edits, history)


def apply_masks(logits: Tensor, masked: MaskedRows) -> None:
    """Ban what grammars do not allow, in place. Bits become tokens here: a GPU is sent an eighth, and unpacks them."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = ((masked.allowed.unsqueeze(2) & bits) == 0).flatten(1)[:, : logits.shape[1]]
    logits[masked.rows] = logits[masked.rows].masked_fill(banned, logits_processors.BANNED)


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """What is to be told of chosen tokens, still as tensors, one row per token.

    tokens, ranks: [rows] int64; own: [rows] float32, of the tokens themselves; ids [rows, width] int64 and values
    [rows, width] float32: of the most likely ones.
    """

    tokens: Tensor
    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor

    def fetched(self, fetch: Callable[[Tensor], Tensor]) -> LogprobTable:
        return LogprobTable(*map(fetch, (self.tokens, self.own, self.ranks, self.ids, self.values)))

    def rows(self, counts: list[int]) -> list[TokenLogprob]:
        """With counts[row] alternatives each."""
        columns = (self.tokens, self.own, self.ranks, self.ids, self.values)
        return [
            TokenLogprob(token, logprob, rank, list(zip(top_ids, top_values, strict=True))[:count])
            for (token, logprob, rank, top_ids, top_values), count in zip(
                zip(*(column.tolist() for column in columns), strict=True), counts, strict=True
            )
        ]


def logprob_table(logits: Tensor, tokens: Tensor, width: int) -> LogprobTable:
    """Log-probabilities of `tokens` [rows] and of the `width` most likely ones, under logits [rows, vocab]."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > own).sum(-1) + 1
    width = min(width, logits.shape[-1])
    values, ids = logprobs.topk(width, dim=-1) if width else (logprobs[:, :0], tokens.unsqueeze(1)[:, :0])
    return LogprobTable(tokens, own.squeeze(1), ranks, ids, values)


def token_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` [rows] under logits [rows, vocab], with counts[row] alternatives each."""
    return logprob_table(logits, tokens, max(counts)).rows(counts)

"""Samples one token per row.

sample_rows(logits, random) -> tokens [rows] int64, -1 where the largest logit is not finite; `sample_rows_plain` with
    `draw_rows_plain` is the oracle
    logits: [rows, vocab] float32
    random: groups of rows that are drawn by given random numbers, with their parameters; either all rows of a group
    have filters (top_k, top_p, min_p) or none has. All other rows take their most likely token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.wire.plan import ALL_TOKENS_BANNED

CANDIDATES = 1024
CACHED = 2**18  # logits processed at a time on a CPU, so that intermediate results stay in its cache
MIN_TEMPERATURE = 1e-2  # vLLM's too


@dataclass(slots=True)
class RandomRows:
    """Rows of logits that are sampled in the same way, with their parameters."""

    rows: Tensor  #: [n] int64
    temperature: Tensor  #: [n, 1] float32, like the next three
    uniform: Tensor
    top_p: Tensor
    min_p: Tensor
    width: int  #: number of candidates to sort: top_k, or the vocabulary's size without it; 0 if there are no filters
    index: list[int] = field(default_factory=list)  #: `rows` on the host

    def scaled(self, logits: Tensor) -> Tensor:
        """Return these rows of logits [rows, vocab], divided by temperature."""
        return logits[self.rows] / self.temperature.clamp(min=MIN_TEMPERATURE)

    def part(self, index: slice | Tensor) -> RandomRows:
        columns = (self.rows, self.temperature, self.uniform, self.top_p, self.min_p)
        rows, temperature, uniform, top_p, min_p = (column[index] for column in columns)
        return RandomRows(rows, temperature, uniform, top_p, min_p, self.width)


DrawRows = Callable[[Tensor, Tensor, RandomRows], Tensor]
"""Return tokens [n] int64 for the n rows of a group, arbitrary where the largest logit is not finite. Takes logits
[rows, vocab] float32, the largest logit of each row, and the group."""

SampleRows = Callable[[Tensor, list[RandomRows]], Tensor]


def select(device: torch.device) -> SampleRows:
    """Return the fastest version, compiled."""
    fast = dispatch.module_of(torch.float32, device, cpu="sampling", gpu="sampling")
    if fast is not None:
        sample_rows: SampleRows = fast.sample_rows
        return sample_rows
    return partial(sample_rows_plain, draw_rows_in_parts if device.type == "cpu" else draw_rows_plain)


def sample_rows_plain(draw_rows: DrawRows, logits: Tensor, random: list[RandomRows]) -> Tensor:
    rows = len(logits)
    if sum(len(group.rows) for group in random) == rows:  # no greedy row: the maximum without its index is faster
        best, tokens = logits.amax(dim=-1), torch.empty(rows, dtype=torch.int64, device=logits.device)
    else:
        best, tokens = logits.max(dim=-1)
    for group in random:
        tokens[group.rows] = draw_rows(logits, best, group)
    return torch.where(best == -torch.inf, ALL_TOKENS_BANNED, mark_non_finite(best, tokens))


def mark_non_finite(best: Tensor, tokens: Tensor) -> Tensor:
    """Replace tokens by -1 where the largest logit is not finite."""
    return torch.where(best.isfinite(), tokens, -1)


def draw_rows_plain(logits: Tensor, best: Tensor, group: RandomRows) -> Tensor:
    scaled = group.scaled(logits)
    return draw_sorted(scaled, group) if group.width else draw(scaled.softmax(-1), group.uniform)


def draw_rows_in_parts(logits: Tensor, best: Tensor, group: RandomRows) -> Tensor:
    """Draw like `draw_rows_plain`, on a CPU, a few rows at a time."""
    tokens, at_once = [], max(2, CACHED // logits.shape[1])
    for start in range(0, len(group.rows), at_once):
        part = group.part(slice(start, start + at_once))
        scaled = part.scaled(logits)
        tokens.append(draw_filtered(scaled, part) if part.width else draw(scaled.softmax(-1), part.uniform))
    return torch.cat(tokens)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw indices [rows] with probabilities proportional to weights [rows, n]; uniform: [rows, 1] in [0, 1)."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # strictly below the total, so that rounding never picks a candidate of weight 0
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp(max=weights.shape[-1] - 1)  # only NaN weights exceed it; the sampler marks their rows


def draw_sorted(logits: Tensor, group: RandomRows) -> Tensor:
    """Draw from the tokens that remain after min_p, top_k and top_p, applied in this order as in vLLM.

    logits: [rows, vocab], already divided by temperature
    """
    if group.width < logits.shape[-1]:  # tokens beyond top_k are dropped
        values, ids = logits.topk(group.width, dim=-1)
    else:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = relative_weights(values, values[:, :1], group.min_p)
    return draw_nucleus(weights, ids, weights.sum(-1, keepdim=True), group)


def draw_filtered(logits: Tensor, group: RandomRows) -> Tensor:
    """Draw like `draw_sorted`, from logits [rows, vocab], but try the CANDIDATES most likely tokens first.

    Sorting a whole vocabulary takes milliseconds per row, so only rows whose nucleus needs more tokens are sorted.
    This is not used on a GPU, because the host would have to wait for the step to know which rows need sorting.
    """
    vocab_size = logits.shape[-1]
    if group.width < vocab_size:
        return draw_sorted(logits, group)
    values, ids = logits.topk(min(CANDIDATES, vocab_size), dim=-1)
    weights = relative_weights(values, values[:, :1], group.min_p)
    total = relative_weights(logits, values[:, :1], group.min_p).sum(-1, keepdim=True)
    tokens = draw_nucleus(weights, ids, total, group)
    reaches_past = (weights[:, -1:] > 0) & (weights.sum(-1, keepdim=True) < group.top_p * total)
    if len(rows := reaches_past.squeeze(1).nonzero().flatten()):
        tokens[rows] = draw_sorted(logits[rows], group.part(rows))
    return tokens


def relative_weights(logits: Tensor, best: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities relative to that of the most likely token; 0 for tokens below min_p."""
    weights = (logits - best).exp()
    return torch.where(weights >= min_p, weights, 0.0)


def draw_nucleus(weights: Tensor, ids: Tensor, total: Tensor, group: RandomRows) -> Tensor:
    """Draw from the nucleus: the fewest tokens, most likely first, whose weights [rows, n] reach top_p of `total`
    [rows, 1]."""
    before = weights.cumsum(-1) - weights
    # the most likely token always stays, even where top_p is 0 in float32
    nucleus = group.top_p.clamp(min=1e-30) * total
    weights = torch.where((before < nucleus) | (group.top_p >= 1.0), weights, 0.0)
    return ids.gather(1, draw(weights, group.uniform).unsqueeze(1)).squeeze(1)

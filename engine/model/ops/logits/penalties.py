"""Penalties of tokens that have occurred.

penalise(logits, penalties, history) -> None; changes the logits of tokens that occurred, in place
    the repetition penalty (CTRL, arXiv:1909.05858, section 4.1) of tokens of prompt and output, and OpenAI's frequency
    and presence penalties of tokens of the output
    logits: [rows, vocab] float32; history: [slots, max_model_len] int32 token ids
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.ops import dispatch


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of several rows."""

    where: Tensor  #: [5, rows] int64: row, slot, first position that counts, start of the output, number of positions
    amounts: Tensor  #: [3, rows] float32: repetition, frequency, presence
    total: int  #: positions of all rows


Penalise = Callable[[Tensor, Penalties, Tensor], None]


def select(device: torch.device) -> Penalise:
    """Return the fastest version."""
    return dispatch.fastest(penalise_plain, torch.float32, device, gpu="logits")


def penalise_plain(logits: Tensor, penalties: Penalties, history: Tensor) -> None:
    """Compute one value per position. All positions with the same token compute the same value."""
    counts = penalties.where[4]
    sequence = torch.repeat_interleave(counts, output_size=penalties.total)
    row, slot, first, output = penalties.where[:4].index_select(1, sequence).unbind()
    repetition, frequency, presence = penalties.amounts.index_select(1, sequence).unbind()
    begin = (counts.cumsum(0) - counts)[sequence]
    position = torch.arange(penalties.total, device=logits.device) - begin + first
    token = history[slot, position].long()
    vocab_size = logits.shape[1]
    count = totals(sequence * vocab_size + token, (position >= output).float(), len(counts) * vocab_size)
    score = logits[row, token]
    score = torch.where(score > 0, score / repetition, score * repetition)
    logits[row, token] = score - torch.where(count > 0, frequency * count + presence, 0.0)


def totals(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return [n]: for each entry, the sum of `values` over all entries with the same index. index: [n], each below
    `size`. values: [n]."""
    sums = values.new_empty(size)  # zeroes only the few sums that are read
    sums.index_fill_(0, index, 0.0)
    return sums.index_add_(0, index, values)[index]

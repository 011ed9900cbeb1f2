"""Outcome of the drafts that a step has verified."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.devices.device import copy_to


def accepted_tokens(sampled: list[int], drafts: list[int]) -> list[int]:
    """Return the accepted tokens: the drafts equal to the tokens sampled at their positions, and the token after
    them."""
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    # a token without finite logits (-1) is left to the next step, which samples it again
    return sampled[: count + 1] if count == 0 or sampled[count] >= 0 else sampled[:count]


def last_rows(sampled_rows: Tensor, tokens: Tensor, counts: list[int], drafts: Tensor) -> Tensor:
    """Return, for each sequence, the row of the token before its newest one. Does not wait for the device.

    sampled_rows, tokens: [n]; each sequence has one row more than it has drafts. counts: number of drafts of each
    sequence. drafts: [sum(counts)], those of all sequences.
    """
    lasts = np.cumsum(np.array(counts) + 1) - 1
    first, last = copy_to(lasts - counts, tokens.device), copy_to(lasts, tokens.device)
    drafted = copy_to(np.delete(np.arange(len(tokens)), lasts), tokens.device)
    expected = torch.zeros_like(tokens).index_copy_(0, drafted, drafts.to(tokens.dtype))
    # every sequence ends at its last row, whatever was sampled there
    ends = (tokens != expected).index_fill_(0, last, True)
    row = torch.arange(len(tokens), device=tokens.device)
    end = torch.where(ends, row, len(tokens)).flip(0).cummin(0).values.flip(0)[first]
    newest = end - ((tokens[end] < 0) & (end > first)).int()
    return sampled_rows[newest]

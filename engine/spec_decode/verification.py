"""What a step says about the drafts that it has verified."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device import copy_to


def accepted_tokens(sampled: list[int], drafts: list[int]) -> list[int]:
    """Return the drafts that were sampled at their positions, and the token after them."""
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    # one that is not finite (-1) is left to the next step, which samples it again
    return sampled[: count + 1] if count == 0 or sampled[count] >= 0 else sampled[:count]


def last_rows(sampled_rows: Tensor, tokens: Tensor, drafts: list[list[int]]) -> Tensor:
    """Return of each sequence the row that the newest token follows: the first at which another token was sampled than
    was drafted, or the last. Nothing waits for the device.

    sampled_rows, tokens: [n], each sequence has one more than `drafts`, which are by sequence.
    """
    drafted = [[*some, -1] for some in drafts]
    firsts = np.cumsum([0, *map(len, drafted)])[:-1]
    expected = copy_to([token for some in drafted for token in some], tokens.device)
    row = torch.arange(len(tokens), device=tokens.device)
    differs = torch.where(tokens == expected, len(tokens), row)
    newest = differs.flip(0).cummin(0).values.flip(0)[copy_to(firsts, tokens.device)]
    return sampled_rows[newest]

"""The most likely tokens, in an order that leaves nothing to how an algorithm breaks ties."""

from __future__ import annotations

import torch
from torch import Tensor


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids [rows, count] int64 of the largest of logits [rows, vocab] float32, the lower of equals first.

    So a shorter list is always the beginning of a longer one, and begins with what `argmax` finds.
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # which makes -0.0 the 0.0 that it equals
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats are ordered by magnitude
    keys = bits.long() << 32  # of a row no two are equal once the ids are part of them
    keys += torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return keys.topk(min(count, logits.shape[-1]), dim=-1).indices

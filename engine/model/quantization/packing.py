"""Unpacks small integers from int32 words."""

from __future__ import annotations

import torch
from torch import Tensor

# The nibble of each column in AWQ's words, whose order lets a CUDA kernel unpack columns in pairs.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: Tensor, bits: int, dim: int, nibbles: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 words to unsigned integers of `bits` (4 or 8) as int16, 32 / bits times as many along `dim`.
    nibbles: which nibble of a word holds each integer; None if they are in order, from the lowest bits."""
    positions = torch.arange(32 // bits) if nibbles is None else torch.tensor(nibbles)
    shifts = (positions * bits).to(words.device, torch.int32)
    spread = words.movedim(dim, -1)[..., None] >> shifts & (1 << bits) - 1
    return spread.to(torch.int16).flatten(-2).movedim(-1, dim)

"""Masks of grammars.

apply_masks(logits, rows, allowed) -> None; bans the tokens that are not allowed, in place
    logits: [rows, vocab] float32; rows: [n] int64; allowed: [n, bytes] uint8, one bit per token, lowest first
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import dispatch

ApplyMasks = Callable[[Tensor, Tensor, Tensor], None]


def select(device: torch.device) -> ApplyMasks:
    """Return the fastest version."""
    return dispatch.fastest(apply_masks_plain, torch.float32, device, gpu="logits")


def apply_masks_plain(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = ((allowed.unsqueeze(2) & bits) == 0).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(banned, float("-inf"))

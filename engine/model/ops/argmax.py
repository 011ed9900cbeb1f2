"""The most likely token of each row.

argmax(logits) -> the largest logit of each row, [rows] float32, and its index, [rows] int64; among equal logits the
    lowest index; for a row with NaN, NaN and the index of the NaN
    logits: [rows, size] float32, each row's values contiguous
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.ops import dispatch

Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]


def select(device: torch.device) -> Argmax:
    """Return the fastest version."""
    return dispatch.fastest(argmax_plain, torch.float32, device, cpu="sampling")


def argmax_plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.max(-1)
    return values, ids

"""Rotary embedding of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_dim / 2]), as in Hugging Face checkpoints; a copy.

    x:     [tokens, heads, head_dim]
    table: [tokens, head_dim], cos then sin of each pair's angle
    """
    cos, sin = table[:, None].chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

"""Rotary embedding of one tensor. Models rotate q and k while writing K: see `rotate_and_write` in attention.py.

rotate(x, table, positions) -> like x, possibly x itself
    Rotates the pairs (x[i], x[i + rotary_dim / 2]) of each head's first values, as in Hugging Face checkpoints.
    x: [tokens, heads, head_dim], each token's values contiguous
    table: [positions, rotary_dim], cos then sin of each pair's angle; positions: [tokens] int64
    Values of a head after its first `rotary_dim` are unchanged (partial rotary, as in GLM and Phi).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_plain(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[positions, None].chunk(2, dim=-1)
    rotary_dim = table.shape[1]
    a, b = x[..., :rotary_dim].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]), dim=-1)

"""Scores of an indexer, and attention to selected tokens, on a CPU. See ops/sparse/sparse_attention.py for names.

An item of the first kernel is one row and BLOCK of the tokens that it sees. Attention to selected tokens is paged
attention: each row is a sequence, and each block has one vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops.cpu.attention import ATTEND, NO_WINDOW
from engine.model.ops.cpu.kernel import (
    as_f32,
    as_i32,
    constants,
    device_function,
    each_dtype,
    load,
    sum_function,
    work,
)
from engine.model.ops.cpu.vector import LANES

BLOCK = 128  # tokens
COPIED_ROWS = 64  # rows whose vectors are copied at a time, if they must be padded


@sum_function
def dot(a: Any, b: Any, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(size):
        total += load(a, i) * load(b, i)
    return total


@device_function
def index_score_rows(cast: Any, size: int, args: Any) -> None:
    """Score, item by item. size: bytes of a number. args: q, weights, keys, their stride in numbers, places, lengths,
    scores, rows, max_len, heads, dim."""
    rows, max_len, heads, dim = args[8], args[9], args[10], args[11]
    blocks = (max_len + BLOCK - 1) // BLOCK
    for item in work(args, rows * blocks):
        row, first = item // blocks, item % blocks * BLOCK
        last = min(first + BLOCK, np.int64(as_i32(args[6])[row]))
        weights = as_f32(args[2] + 4 * row * heads)
        places, scores = as_i32(args[5] + 4 * row * max_len), as_f32(args[7] + 4 * row * max_len)
        for token in range(first, last):
            key = cast(args[3] + size * np.int64(places[token]) * args[4])
            total = np.float32(0.0)
            for head in range(heads):
                q = cast(args[1] + size * (row * heads + head) * dim)
                total += weights[head] * max(dot(q, key, dim), np.float32(0.0))
            scores[token] = total


INDEX_SCORES = each_dtype(index_score_rows)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    rows, heads, dim = q.shape
    scores = torch.empty(places.shape, dtype=torch.float32)
    INDEX_SCORES.launch(
        q.dtype, rows * -(-places.shape[1] // BLOCK), q, weights, keys, keys.stride(0), places, lengths, scores, rows,
        places.shape[1], heads, dim,
    )  # fmt: skip
    return scores


def attend_selected(q: Tensor, vectors: Tensor, places: Tensor, counts: Tensor, scale: float, rank: int) -> Tensor:
    """Attend to the selected tokens."""
    rows, heads, width = q.shape
    if rest := -width % LANES:
        parts = torch.arange(rows).split(COPIED_ROWS)
        copies = ((*padded(q[part], vectors, places[part], rest), counts[part]) for part in parts)
        return torch.cat([attend_selected(*part, scale, rank) for part in copies])
    row = torch.arange(rows)
    tiles = torch.stack((row, row, torch.ones_like(row), torch.zeros_like(row)), dim=1)
    tiles = torch.cat((torch.tensor([[rows, 1, 0, 0]]), tiles))
    out = torch.empty_like(q)
    ATTEND.launch(
        q.dtype, rows, q, vectors, out, constants(scale, 0.0), tiles, counts, places, places.stride(0), q.stride(0),
        out.stride(0), 1, heads, 1, width, vectors.stride(0), NO_WINDOW, NO_WINDOW, 0, 0, 0,
    )  # fmt: skip
    return out[..., :rank]


def padded(q: Tensor, vectors: Tensor, places: Tensor, rest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append `rest` zeros to each head and to copies of the selected vectors, which change no score. Returns q, these
    copies, and their places."""
    copies = F.pad(vectors[places.flatten()], (0, rest))
    return F.pad(q, (0, rest)), copies, torch.arange(places.numel(), dtype=places.dtype).view(places.shape)

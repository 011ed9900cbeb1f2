"""The most likely token of each row, or several of them in an order that is also defined for equal logits.

argmax(logits) -> the largest logit of each row, [rows] float32, and its index, [rows] int64; among equal logits the
    lowest index; for a row with NaN, NaN and the index of the NaN
    logits: [rows, size] float32, each row's values contiguous
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.model.ops import dispatch

CHUNK = 128  # ids
Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]


def select(device: torch.device) -> Argmax:
    """Return the fastest version."""
    return dispatch.fastest(argmax_plain, torch.float32, device, cpu="sampling")


def argmax_plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.max(-1)
    return values, ids


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids [rows, count] int64 of the largest logits [rows, vocab] float32; among equal logits, lower ids
    come first.

    So a shorter list is always the beginning of a longer one, and the first id is that of `argmax`. Only the `count`
    chunks of the vocabulary with the largest maxima are searched. Their maxima are `count` tokens that come before
    every token of the other chunks.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    chunks = -(-vocab // CHUNK)
    if not 0 < count < chunks:
        return top_ids_plain(logits, count)
    chunked = pad(logits, (0, chunks * CHUNK - vocab), value=float("-inf")).view(rows, chunks, CHUNK)
    first = top_ids_plain(chunked.amax(-1), count).sort(-1).values  # [rows, count], chunks in the order of their ids
    values = chunked.gather(1, first[:, :, None].expand(-1, -1, CHUNK))
    found = top_ids_plain(values.view(rows, count * CHUNK), count)
    return first.gather(1, found // CHUNK) * CHUNK + found % CHUNK


def top_ids_plain(logits: Tensor, count: int) -> Tensor:
    """Return the same as `top_ids`, by sorting keys that are unique within a row."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats are ordered by magnitude
    keys = bits.long() << 32
    keys += torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return keys.topk(min(count, logits.shape[-1]), dim=-1).indices

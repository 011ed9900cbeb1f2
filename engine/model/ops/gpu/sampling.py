"""Samples a token of each row. The best token of each row is found in Triton, in two launches; tokens of random rows
are drawn in torch (ops/sampling.py). Nothing here waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch
from engine.model.ops.sampling import RandomRows, draw_rows_plain
from engine.wire.plan import ALL_TOKENS_BANNED

SEGMENT = 8192  # tokens of the vocabulary that a program reads
NONE = tl.constexpr(2147483647)
BANNED = tl.constexpr(ALL_TOKENS_BANNED)


@triton.jit
def best_of_segment_kernel(
    logits, bests, best_ids, vocab, stride, SEGMENT: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Find the best token of a segment of a row. Grid (rows, segments).

    bests, best_ids [rows, segments]: the largest logit, NaN if there is one, and the first token that has it
    """
    dependent_launch.begin(DEPENDENT)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + segment
    i = segment * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    broken = tl.sum((x != x).to(tl.int32), 0) > 0
    tl.store(bests + at, tl.where(broken, float("nan"), best))
    tl.store(best_ids + at, tl.min(tl.where(x == best, i, vocab - 1), 0))


@triton.jit
def best_of_row_kernel(
    bests, best_ids, best, tokens, segments, SEGMENTS_PAD: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Find the best token of a row from those of its segments. Grid (rows).

    best [rows]: the largest logit, NaN if there is one; tokens [rows]: BANNED if it is -inf, -1 if it is NaN or inf
    """
    dependent_launch.begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS_PAD)
    at, there = row * segments + segment, segment < segments
    each = tl.load(bests + at, mask=there, other=float("-inf"))
    broken = tl.sum((each != each).to(tl.int32), 0) > 0
    largest = tl.where(broken, float("nan"), tl.max(each, 0))
    token = tl.min(tl.where(there & (each == largest), tl.load(best_ids + at, mask=there, other=0), NONE), 0)
    token = tl.where(tl.abs(largest) < float("inf"), token.to(tl.int64), -1)
    tl.store(best + row, largest)
    tl.store(tokens + row, tl.where(largest == float("-inf"), BANNED, token))


def sample_rows(logits: Tensor, random: list[RandomRows]) -> Tensor:
    best, tokens = best_tokens(logits)
    for group in random:
        drawn, marked = draw_rows_plain(logits, best, group), tokens[group.rows]
        tokens[group.rows] = torch.where(marked < 0, marked, drawn)
    return tokens


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row of logits [rows, vocab], and the first token that has it, [rows] int64;
    where the largest is not finite, the mark that stands for the row's token."""
    rows, vocab = logits.shape
    segments = triton.cdiv(vocab, SEGMENT)
    bests, best_ids = (
        torch.empty(rows, segments, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.int32)
    )
    best, tokens = (torch.empty(rows, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.int64))
    best_of_segment_kernel[rows, segments](
        logits, bests, best_ids, vocab, logits.stride(0), SEGMENT=SEGMENT, num_warps=8,
        **dependent_launch.options(logits.device),
    )  # fmt: skip
    best_of_row_kernel[rows,](
        bests, best_ids, best, tokens, segments, SEGMENTS_PAD=triton.next_power_of_2(segments),
        **dependent_launch.options(logits.device),
    )  # fmt: skip
    return best, tokens

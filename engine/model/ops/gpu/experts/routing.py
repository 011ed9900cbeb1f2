"""Routes tokens to experts, in Triton: kernels that choose experts, sort pairs by expert, and combine the results.

The plain versions are in ops/moe.py. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch

PAIRS = 1024  # pairs that a program reads at a time
COUNTED_AT_ONCE = 1 << 17  # experts times pairs: counting so many in every program is faster than a launch
COMPARED = 8192  # experts and pairs that are compared at a time
TILES = 128  # tiles that a program writes at a time
BLOCK = 1024  # columns of a program that combines


@triton.jit
def top_k_softmax_kernel(
    logits, experts, weights, stride,
    NUM: tl.constexpr, NUM_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Choose the experts of a token by softmax. Grid (tokens)."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, NUM_PAD), tl.arange(0, K_PAD)
    wide = tl.load(logits + token * stride + expert, mask=expert < NUM, other=float("-inf")).to(tl.float32)
    scores = tl.exp(wide - tl.max(wide, 0))
    scores = scores / tl.sum(scores, 0)
    best, chosen = tl.zeros([K_PAD], tl.float32), tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(K):
        index = tl.minimum(tl.argmax(scores, 0), NUM - 1)  # with NaN, it may be no expert
        best = tl.where(choice == i, tl.max(scores, 0), best)
        chosen = tl.where(choice == i, index, chosen)
        scores = tl.where(expert == index, -1.0, scores)
    if NORMALISE:
        best = best / tl.sum(best, 0)
    tl.store(experts + token * K + choice, chosen.to(tl.int64), mask=choice < K)
    tl.store(weights + token * K + choice, best.to(weights.dtype.element_ty), mask=choice < K)


def top_k_softmax(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    tokens, num = logits.shape
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=logits.dtype, device=logits.device)
    top_k_softmax_kernel[tokens,](
        logits, experts, weights, logits.stride(0), NUM=num, NUM_PAD=triton.next_power_of_2(num),
        K=k, K_PAD=triton.next_power_of_2(k), NORMALISE=normalise, num_warps=1,
        **dependent_launch.options(logits.device),
    )  # fmt: skip
    return experts, weights


@triton.jit
def top_k_of_groups_kernel(
    logits, correction, experts, weights, stride, factor,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORMALISE: tl.constexpr, SOFTMAX: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Choose the experts of a token. Grid (tokens). Groups of SIZE experts are padded to SIZE_PAD, so an expert's
    position differs from its number. SOFTMAX: scores are a softmax without a correction, and a group's score is that of
    its best expert; else scores are sigmoids, and a group's score is the sum of its two best."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    position, rank = tl.arange(0, GROUPS_PAD * SIZE_PAD), tl.arange(0, K_PAD)
    expert = position // SIZE_PAD * SIZE + position % SIZE_PAD
    exists = (position // SIZE_PAD < GROUPS) & (position % SIZE_PAD < SIZE)
    scores = tl.load(logits + token * stride + expert, mask=exists, other=float("-inf"))
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
        choice = scores
    else:
        scores = tl.sigmoid(scores)
        choice = scores + tl.load(correction + expert, mask=exists, other=0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:
        grouped, group = choice.reshape(GROUPS_PAD, SIZE_PAD), tl.arange(0, GROUPS_PAD)
        of_groups = tl.max(grouped, 1)
        if not SOFTMAX:
            first = tl.arange(0, SIZE_PAD)[None, :] == tl.argmax(grouped, 1)[:, None]
            of_groups += tl.max(tl.where(first, float("-inf"), grouped), 1)
        kept = tl.zeros([GROUPS_PAD], tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            best_group = tl.argmax(of_groups, 0)
            kept = tl.where(group == best_group, 1, kept)
            of_groups = tl.where(group == best_group, float("-inf"), of_groups)
        choice = tl.where(kept[:, None] > 0, grouped, float("-inf")).reshape(GROUPS_PAD * SIZE_PAD)
    best, chosen = tl.zeros([K_PAD], tl.float32), tl.zeros([K_PAD], tl.int32)
    for i in tl.static_range(K):
        taken = position == tl.argmax(choice, 0)
        index = tl.minimum(tl.sum(tl.where(taken, expert, 0), 0), SIZE * GROUPS - 1)  # with NaN, it may be no expert
        best = tl.where(rank == i, tl.sum(tl.where(taken, scores, 0.0), 0), best)
        chosen = tl.where(rank == i, index, chosen)
        choice = tl.where(taken, float("-inf"), choice)
    if NORMALISE:
        best = best / (tl.sum(best, 0) + 1e-20)
    tl.store(experts + token * K + rank, chosen.to(tl.int64), mask=rank < K)
    tl.store(weights + token * K + rank, (best * factor).to(weights.dtype.element_ty), mask=rank < K)


def top_k_sigmoid(
    logits: Tensor, correction: Tensor, groups: tuple[int, int], k: int, normalise: bool, factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose experts, best first: logits [tokens, num_experts] float32, correction [num_experts] -> experts [tokens, k]
    int64, weights [tokens, k] of `dtype`, multiplied by `factor`."""
    return route(logits, correction, groups, k, normalise, factor, dtype)


def top_k_of_groups(
    logits: Tensor, groups: tuple[int, int], k: int, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return route(logits, None, groups, k, False, factor, dtype)


def route(
    logits: Tensor, correction: Tensor | None, groups: tuple[int, int], k: int, normalise: bool, factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """correction: None for a softmax."""
    (tokens, num), (num_groups, topk_groups) = logits.shape, groups
    size = num // num_groups
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=dtype, device=logits.device)
    top_k_of_groups_kernel[tokens,](
        logits, logits if correction is None else correction, experts, weights, logits.stride(0), factor, SIZE=size,
        SIZE_PAD=triton.next_power_of_2(size), GROUPS=num_groups, GROUPS_PAD=triton.next_power_of_2(num_groups),
        TOPK_GROUPS=topk_groups, K=k, K_PAD=triton.next_power_of_2(k), NORMALISE=normalise,
        SOFTMAX=correction is None, num_warps=1, **dependent_launch.options(logits.device),
    )  # fmt: skip
    return experts, weights


class SortedPairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert, and divided into tiles."""

    order: Tensor
    """[pairs] int64: the pair at each position"""
    tokens: Tensor
    """[pairs] int64: the token at each position: that of pair p is p // k"""
    positions: Tensor
    """[pairs] int64: the position of each pair"""
    ends: Tensor
    """[experts] int32: the position behind each expert's last pair"""
    tiles: Tensor
    """[3, tiles] int64: the expert of each tile, and where its positions begin and end; surplus tiles are empty"""


@triton.jit
def count_pairs(experts, others, pairs, PAIRS: tl.constexpr):
    """Return the number of pairs of each of the experts `others`."""
    found = tl.zeros(others.shape, tl.int32)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
        found += tl.sum((chosen[None, :] == others[:, None]).to(tl.int32), 1)
    return found


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(experts, counts, pairs, PAIRS: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Count the pairs of an expert. Grid (experts)."""
    dependent_launch.begin(DEPENDENT)
    expert = tl.program_id(0) + tl.arange(0, 1)
    tl.store(counts + expert, count_pairs(experts, expert, pairs, PAIRS))


@triton.jit(do_not_specialize=["pairs", "tile_rows", "num_tiles"])
def order_kernel(
    experts, counts, order, tokens, positions, ends, tiles, pairs, tile_rows, num_tiles,
    K: tl.constexpr, NUM: tl.constexpr, NUM_PAD: tl.constexpr, COUNTED: tl.constexpr, FEW: tl.constexpr,
    PAIRS: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write an expert's part of SortedPairs. Grid (experts). The last program also writes the surplus tiles, which
    are empty. COUNTED: `counts` has the number of each expert's pairs; else each program counts all pairs itself."""
    dependent_launch.begin(DEPENDENT)
    expert, others = tl.program_id(0), tl.arange(0, NUM_PAD)
    if COUNTED:  # noqa: SIM108
        each = tl.load(counts + others, mask=others < NUM, other=0)
    else:
        each = count_pairs(experts, others, pairs, FEW)
    tiles_each = (each + tile_rows - 1) // tile_rows
    first = tl.sum(tl.where(others < expert, each, 0), 0)
    end = tl.sum(tl.where(others <= expert, each, 0), 0)
    first_tile = tl.sum(tl.where(others < expert, tiles_each, 0), 0)
    end_tile = tl.sum(tl.where(others <= expert, tiles_each, 0), 0)
    if expert == NUM - 1:
        end_tile = num_tiles
    tl.store(ends + expert, end)
    for start in range(first_tile, end_tile, TILES):
        tile = start + tl.arange(0, TILES)
        here, position = tile < end_tile, first + (tile - first_tile) * tile_rows
        tl.store(tiles + tile, (tl.zeros([TILES], tl.int32) + expert).to(tl.int64), mask=here)
        tl.store(tiles + num_tiles + tile, position.to(tl.int64), mask=here)
        tl.store(tiles + 2 * num_tiles + tile, tl.minimum(position + tile_rows, end).to(tl.int64), mask=here)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        own = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
        position = first + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order + position, pair.to(tl.int64), mask=own)
        tl.store(tokens + position, (pair // K).to(tl.int64), mask=own)
        tl.store(positions + pair, position.to(tl.int64), mask=own)
        first += tl.sum(own.to(tl.int32), 0)


def sort_pairs(experts: Tensor, num_experts: int, tile_rows: int) -> SortedPairs:
    """Sort pairs by expert. experts: [tokens, k] int64, from 0 to num_experts - 1. tile_rows: most pairs of a tile."""
    pairs, device = experts.numel(), experts.device
    # each expert with a pair may need one tile that is not full
    num_tiles = (pairs + min(pairs, num_experts) * (tile_rows - 1)) // tile_rows
    order, tokens, positions = (torch.empty(pairs, dtype=torch.int64, device=device) for _ in range(3))
    counts, ends = (torch.empty(num_experts, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.empty(3, num_tiles, dtype=torch.int64, device=device)
    if counted := pairs * num_experts > COUNTED_AT_ONCE:
        count_kernel[num_experts,](experts, counts, pairs, PAIRS=PAIRS, **dependent_launch.options(device))
    num_pad = triton.next_power_of_2(num_experts)
    order_kernel[num_experts,](
        experts, counts, order, tokens, positions, ends, tiles, pairs, tile_rows, num_tiles,
        K=experts.shape[1], NUM=num_experts, NUM_PAD=num_pad, COUNTED=counted, FEW=max(16, COMPARED // num_pad),
        PAIRS=PAIRS, TILES=TILES, **dependent_launch.options(device),
    )  # fmt: skip
    return SortedPairs(order, tokens, positions, ends, tiles)


@triton.jit
def combine_kernel(
    mixed, positions, weights, own, out, size, K: tl.constexpr, PERMUTED: tl.constexpr, SOME: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Add up the results of a token's experts. Grid (tokens, size / BLOCK). SOME: only those of the pairs in `own`."""
    dependent_launch.begin(DEPENDENT)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        pair = token * K + choice
        position = tl.load(positions + pair) if PERMUTED else pair
        here = i < size
        if SOME:
            here &= tl.load(own + pair).to(tl.int1)
        values = tl.load(mixed + position * size + i, mask=here, other=0.0).to(tl.float32)
        acc += values * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * size + i, acc.to(out.dtype.element_ty), mask=i < size)


def combine(mixed: Tensor, weights: Tensor, positions: Tensor | None = None, own: Tensor | None = None) -> Tensor:
    """Add up the results of each token's experts, in their order, times weights [tokens, k].

    mixed: [pairs, size], by pair, or by position if `positions` gives the position of each pair. own: [tokens, k] bool,
    the pairs to add up; None for all.
    """
    (tokens, k), size = weights.shape, mixed.shape[1]
    out = torch.empty(tokens, size, dtype=mixed.dtype, device=mixed.device)
    combine_kernel[tokens, triton.cdiv(size, BLOCK)](
        mixed, mixed if positions is None else positions, weights, weights if own is None else own, out, size,
        K=k, PERMUTED=positions is not None, SOME=own is not None, BLOCK=BLOCK,
        **dependent_launch.options(mixed.device),
    )  # fmt: skip
    return out


@triton.jit
def add_shared_kernel(
    x, y, gate, out, size, stride, GATED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Compute x + y, or x + y * sigmoid(gate). Grid (tokens, size / BLOCK). stride: of the gates."""
    dependent_launch.begin(DEPENDENT)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mixed = tl.load(x + token * size + i, mask=i < size, other=0.0).to(tl.float32)
    more = tl.load(y + token * size + i, mask=i < size, other=0.0).to(tl.float32)
    if GATED:
        more *= tl.sigmoid(tl.load(gate + token * stride).to(tl.float32))
    tl.store(out + token * size + i, (mixed + more).to(out.dtype.element_ty), mask=i < size)


def add_shared(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    """Return x + y, or x + y * sigmoid(gate). x, y: [tokens, size], contiguous; gate: [tokens, 1]."""
    tokens, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_shared_kernel[tokens, triton.cdiv(size, BLOCK)](
        x, y, x if gate is None else gate, out, size, 0 if gate is None else gate.stride(0), GATED=gate is not None,
        BLOCK=BLOCK, **dependent_launch.options(x.device),
    )  # fmt: skip
    return out

"""The products of experts on a CPU. One kernel computes all experts of a layer.

Pairs of a token and one of its experts are sorted by expert. The rows of an expert are then adjacent, and a thread
multiplies them by one column of its weight, as in linear.py. A token's sums do not depend on other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    CpuKernel,
    TokenCount,
    as_i64,
    device_function,
    each_dtype,
    empty,
    exp,
    kernel,
    load,
    store,
    take,
    work,
)
from engine.model.ops.cpu.linear import BLOCK_ROWS, COLUMN, multiply_rows

TOKENS = 2  # tokens that a thread takes at a time


@kernel
def sort_pairs(args: Any) -> None:
    """Sort pairs by expert. One thread does it. args: experts of the pairs, their order, each pair's place in it,
    segments, number of pairs, number of experts. segments: their number, then for each of them the expert and its
    first and last row, at most BLOCK_ROWS rows. Pairs of an expert of another rank, whose number is the number of
    experts, come last; their place is -1."""
    experts, order, place, segments = as_i64(args[1]), as_i64(args[2]), as_i64(args[3]), as_i64(args[4])
    pairs, size = args[5], args[6]
    if take(args, 1) > 0:
        return
    starts = np.zeros(size + 2, np.int64)
    for pair in range(pairs):
        starts[experts[pair] + 1] += 1
    count = 0
    for expert in range(size):
        starts[expert + 1] += starts[expert]
        for row in range(starts[expert], starts[expert + 1], BLOCK_ROWS):
            segments[1 + 3 * count], segments[2 + 3 * count] = expert, row
            segments[3 + 3 * count] = min(row + BLOCK_ROWS, starts[expert + 1])
            count += 1
    segments[0] = count
    for pair in range(pairs):
        row = starts[experts[pair]]
        starts[experts[pair]] += 1
        order[row], place[pair] = pair, row if experts[pair] < size else -1


@device_function
def gather_rows(cast: Any, args: Any) -> None:
    """Copy the row of each pair's token. args: x, order, out, pairs, x's stride, size, number of experts per token."""
    x, order, out = cast(args[1]), as_i64(args[2]), cast(args[3])
    pairs, stride, size, k = args[4], args[5], args[6], args[7]
    for row in work(args, pairs, TOKENS):
        source = order[row] // k * stride
        for i in range(size):
            out[row * size + i] = x[source + i]


@device_function
def multiply_segments(cast: Any, item_bytes: Any, args: Any) -> None:
    """Multiply rows by their experts' weights. args: x, weights, biases or 0, out, segments, inputs, outputs, x's
    stride, number of pairs, number of experts."""
    segments, inputs, outputs, x_stride = as_i64(args[5]), args[6], args[7], args[8]
    columns = outputs // COLUMN
    # the largest possible number: a thread that starts after others have reused the memory of `segments` must see
    # from its arguments alone that no work is left
    items = columns * (min(args[9], args[10]) + args[9] // BLOCK_ROWS)
    item = take(args, 1)
    while item < items:
        if item >= segments[0] * columns:
            take(args, items)
            break
        following = take(args, 1)
        after = following if following < segments[0] * columns else item
        segment, first = 1 + 3 * (item // columns), item % columns * COLUMN
        start = segments[segment] * outputs + first
        ahead = segments[1 + 3 * (after // columns)] * outputs + after % columns * COLUMN
        column = cast(args[2] + item_bytes * start * inputs)
        bias = cast(args[3] + item_bytes * start if args[3] else 0)
        multiply_rows(
            cast, cast, item_bytes, item_bytes, args[1], x_stride, args[4] + item_bytes * first, outputs,
            segments[segment + 1], segments[segment + 2], column, bias, inputs,
            args[2] + item_bytes * ahead * inputs,
        )  # fmt: skip
        item = following


@device_function
def combine_rows(cast: Any, args: Any) -> None:
    """Add up each token's products, multiplied by the weights of their experts. args: products, places of the pairs,
    weights, out, tokens, number of experts per token, size."""
    mixed, place, weights, out = cast(args[1]), as_i64(args[2]), cast(args[3]), cast(args[4])
    tokens, k, size = args[5], args[6], args[7]
    sums = np.empty(size, np.float32)
    for token in work(args, tokens, TOKENS):
        for i in range(size):
            sums[i] = np.float32(0.0)
        for pair in range(token * k, (token + 1) * k):
            if place[pair] < 0:
                continue
            row, weight = place[pair] * size, load(weights, pair)
            for i in range(size):
                sums[i] += weight * load(mixed, row + i)
        for i in range(size):
            store(out, token * size + i, sums[i])


@device_function
def add_shared_rows(cast: Any, args: Any) -> None:
    """Add y, the output of a shared expert, to x; or y times the sigmoid of a gate. args: x, y, gate or 0, out, tokens,
    size, the strides of x, y and gate."""
    x, y, gate, out, tokens, size = cast(args[1]), cast(args[2]), cast(args[3]), cast(args[4]), args[5], args[6]
    one = np.float32(1.0)
    for token in work(args, tokens, TOKENS):
        a, b, factor = token * args[7], token * args[8], one
        if args[3]:
            factor = one / (one + exp(-load(gate, token * args[9])))
        for i in range(size):
            store(out, token * size + i, load(x, a + i) + factor * load(y, b + i))


SORT = CpuKernel({torch.bfloat16: sort_pairs, torch.float32: sort_pairs})
GATHER = each_dtype(gather_rows)
MULTIPLY_SEGMENTS = each_dtype(multiply_segments)
COMBINE = each_dtype(combine_rows)
ADD_SHARED = each_dtype(add_shared_rows)


def mix_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], experts: Tensor, weights: Tensor,
    biases: tuple[Tensor, Tensor] | None = None, addends: Sequence[Callable[..., None]] = (),
) -> Tensor:  # fmt: skip
    """Compute the same as `mix_experts_plain` in ops/moe.py. gate_up, down: the packed weights of all experts, one
    after another."""
    return combine(*pair_products(x, gate_up, down, activation, experts, biases, addends), weights)


def pair_products(
    x: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], experts: Tensor,
    biases: tuple[Tensor, Tensor] | None, addends: Sequence[Callable[..., None]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the products of all pairs, [pairs, hidden], sorted by expert, and each pair's place among them, [tokens,
    k]. Pairs of an expert of another rank have the place -1."""
    (tokens, size), k = x.shape, experts.shape[1]
    experts = experts.contiguous()  # unchanged if a kernel has chosen them
    order, place = empty((tokens, k), torch.int64), empty((tokens, k), torch.int64)
    segments = empty((tokens, 1 + 6 * k), torch.int64)  # room for twice as many as there are pairs
    SORT.launch(x.dtype, 1, experts, order, place, segments, TokenCount(tokens * k), len(gate_up))
    rows = empty((tokens * k, size), x.dtype)
    GATHER.launch(x.dtype, -(-tokens * k // TOKENS), x, order, rows, TokenCount(tokens * k), x.stride(0), size, k)
    first, second = biases or (None, None)
    hidden = products(rows, gate_up, first, segments)
    if addends:
        chosen, of_tokens = experts.flatten()[order.flatten()], order.flatten() // k
        chosen[chosen == len(gate_up)] = -1
        addends[0](hidden, rows, chosen, of_tokens)
    hidden = activation(hidden)
    mixed = products(hidden, down, second, segments)
    if addends:
        addends[1](mixed, hidden, chosen, of_tokens)
    return mixed, place


def combine(mixed: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's products, in the order of its experts: [tokens, hidden]. mixed, place: of
    `pair_products`; weights: [tokens, k]."""
    tokens, k = weights.shape
    assert weights.dtype == mixed.dtype, "weights and products must have the same dtype"
    weights = weights.contiguous()
    out = empty((tokens, mixed.shape[1]), mixed.dtype)
    COMBINE.launch(
        mixed.dtype, -(-tokens // TOKENS), mixed, place, weights, out, TokenCount(tokens), k, mixed.shape[1]
    )  # fmt: skip
    return out


def products(x: Tensor, weights: Tensor, biases: Tensor | None, segments: Tensor) -> Tensor:
    """Multiply rows x [pairs, inputs], sorted by expert, by the experts' weights: [pairs, outputs]."""
    columns, inputs = weights.shape[1], weights.shape[2] * weights.shape[4]
    out = empty((len(x), columns * COLUMN), x.dtype)
    MULTIPLY_SEGMENTS.launch(
        x.dtype, len(x) * columns, x, weights, 0 if biases is None else biases, out, segments, inputs,
        columns * COLUMN, x.stride(0), TokenCount(len(x)), len(weights),
    )  # fmt: skip
    return out


def add_shared(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    tokens, size = x.shape
    out, gate_stride = empty((tokens, size), x.dtype), 0 if gate is None else gate.stride(0)
    ADD_SHARED.launch(
        x.dtype, -(-tokens // TOKENS), x, y, 0 if gate is None else gate, out, TokenCount(tokens), size, x.stride(0),
        y.stride(0), gate_stride,
    )  # fmt: skip
    return out

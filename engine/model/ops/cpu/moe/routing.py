"""Chooses the experts of each token on a CPU. A token's choice does not depend on other tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.cpu.activation import scaled
from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_f32,
    as_i64,
    device_function,
    each_dtype,
    empty,
    exp,
    load,
    store,
    sum_function,
    work,
)

TOKENS = 2  # tokens that a thread takes at a time
LOWEST = np.float32(-3e38)  # below all scores; infinities are not used, since the compiler assumes that there are none


@sum_function
def sum_of(values: Any, count: int) -> Any:
    total = np.float32(0.0)
    for i in range(count):
        total += values[i]
    return total


@device_function
def take_largest(values: Any, count: Any) -> Any:
    """Return the place of the largest value (of equal values, the first), and write LOWEST there."""
    place, best = 0, LOWEST
    for i in range(count):
        if values[i] > best:
            place, best = i, values[i]
    values[place] = LOWEST
    return place


@device_function
def leave_out_groups(choice: Any, size: Any, groups: Any, kept: Any, of_groups: Any, by_two: Any, rest: Any) -> None:
    """Replace the choices in all but the `kept` best groups by `rest`. A group is scored by its best choice, or if
    `by_two`, by the sum of its two best. of_groups: memory for the groups' scores."""
    width = size // groups
    for group in range(groups):
        best, second = LOWEST, LOWEST
        for i in range(group * width, (group + 1) * width):
            if choice[i] > best:
                best, second = choice[i], best
            elif choice[i] > second:
                second = choice[i]
        of_groups[group] = best + second if by_two else best
    for _ in range(kept):
        take_largest(of_groups, groups)
    for group in range(groups):
        if of_groups[group] != LOWEST:
            for i in range(group * width, (group + 1) * width):
                choice[i] = rest


@device_function
def route_rows(cast: Any, args: Any) -> None:
    """Choose experts. args: logits, correction, experts, weights, tokens, the logits' stride, number of experts, of
    experts per token, of groups and of those that are kept, 1 for sigmoids in place of a softmax, 1 if weights are
    scaled to add up to 1."""
    logits, correction, experts, weights = cast(args[1]), as_f32(args[2]), as_i64(args[3]), cast(args[4])
    tokens, stride, size, k, groups, kept = args[5], args[6], args[7], args[8], args[9], args[10]
    one = np.float32(1.0)
    scores, choice = np.empty(size, np.float32), np.empty(size, np.float32)
    of_groups = np.empty(groups, np.float32)
    for token in work(args, tokens, TOKENS):
        start = token * stride
        if args[11]:
            for i in range(size):
                scores[i] = one / (one + exp(-load(logits, start + i)))
                choice[i] = scores[i] + correction[i]
        else:
            top = load(logits, start)
            for i in range(size):
                top = max(top, load(logits, start + i))
            for i in range(size):
                scores[i] = exp(load(logits, start + i) - top)
            total = sum_of(scores, size)
            for i in range(size):
                scores[i] /= total
                choice[i] = scores[i]
        if kept < groups:
            leave_out_groups(choice, size, groups, kept, of_groups, args[11], LOWEST if args[11] else np.float32(0.0))
        total = np.float32(0.0)
        for i in range(token * k, (token + 1) * k):
            experts[i] = take_largest(choice, size)
            total += scores[experts[i]]
        if args[11]:
            total += np.float32(1e-20)
        for i in range(token * k, (token + 1) * k):
            score = scores[experts[i]]
            store(weights, i, score / total if args[12] else score)


ROUTE = each_dtype(route_rows)


def top_k_softmax(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    return route(logits, None, (1, 1), k, normalise)


def top_k_sigmoid(
    logits: Tensor, correction: Tensor, groups: tuple[int, int], k: int, normalise: bool, factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    experts, weights = route(logits, correction, groups, k, normalise)
    return experts, scaled(weights, factor, dtype)


def top_k_of_groups(
    logits: Tensor, groups: tuple[int, int], k: int, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    experts, weights = route(logits, None, groups, k, False)
    return experts, scaled(weights, factor, dtype)


def route(
    logits: Tensor, correction: Tensor | None, groups: tuple[int, int], k: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Return experts [tokens, k] int64 and weights [tokens, k] of the logits' dtype. correction: [num_experts] float32;
    None for a softmax. logits: each token's values contiguous."""
    tokens, size = logits.shape
    experts, weights = empty((tokens, k), torch.int64), empty((tokens, k), logits.dtype)
    ROUTE.launch(
        logits.dtype, -(-tokens // TOKENS), logits, 0 if correction is None else correction, experts, weights,
        TokenCount(tokens), logits.stride(0), size, k, *groups, int(correction is not None), int(normalise),
    )  # fmt: skip
    return experts, weights

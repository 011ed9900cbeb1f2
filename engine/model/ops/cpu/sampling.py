"""Chooses a token for each row on a CPU: the most likely token, or a random one. Logits are compared as
integers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    CpuKernel,
    as_f32,
    as_i32,
    as_i64,
    device_function,
    empty,
    exp,
    kernel,
    load,
    store,
    sum_function,
    work,
)
from engine.model.ops.sampling import MIN_TEMPERATURE, RandomRows, draw_rows_in_parts, sample_rows_plain

PART = 1024  # logits per part; the largest is found for each part first, its index only in the best part
SUMMED = 512  # logits per part whose weights are summed; the token is then searched in one part


@device_function
def order(bits: Any) -> Any:
    """Return an integer that is larger for a larger float32 and largest for NaN; equal for both zeros."""
    size = bits & np.int32(0x7FFFFFFF)
    if size > np.int32(0x7F800000):
        return np.int32(0x7FFFFFFF)
    return bits if bits >= 0 else np.int32(-size)


@kernel
def argmax_f32(args: Any) -> None:
    logits, values, ids = as_i32(args[1]), as_f32(args[2]), as_i64(args[3])
    rows, size, stride = args[4], args[5], args[6]
    for row in work(args, rows):
        start, top, found = row * stride, np.int32(-0x80000000), 0
        for part in range(0, size, PART):
            highest = np.int32(-0x80000000)
            for i in range(part, min(part + PART, size)):
                highest = max(highest, order(logits[start + i]))
            if highest > top:
                top, found = highest, part
        while order(logits[start + found]) != top:
            found += 1
        store(values, row, load(as_f32(args[1]), start + found))
        ids[row] = found


@device_function
def weight_of(logit: Any, best: Any, slope: Any) -> Any:
    """Return the softmax of a logit before division by the sum; 0 if it is no normal float32, as for banned tokens."""
    power = (logit - best) * slope
    return exp(power) if power > np.float32(-87.0) else np.float32(0.0)


@sum_function
def sum_of_weights(logits: Any, first: int, last: int, best: Any, slope: Any) -> Any:
    total = np.float32(0.0)
    for i in range(first, last):
        total += weight_of(logits[i], best, slope)
    return total


@kernel
def draw_f32(args: Any) -> None:
    all_best, rows, temperatures, uniform = as_f32(args[2]), as_i64(args[3]), as_f32(args[4]), as_f32(args[5])
    tokens, count, size, stride, parts = as_i64(args[7]), args[8], args[9], args[10], args[11]
    for item in work(args, count):
        row = rows[item]
        logits, sums = as_f32(args[1] + 4 * row * stride), as_f32(args[6] + 4 * item * parts)
        best, slope, total = all_best[row], np.float32(1.0) / temperatures[item], 0.0
        for part in range(parts):
            weights = sum_of_weights(logits, part * SUMMED, min((part + 1) * SUMMED, size), best, slope)
            sums[part] = weights
            total += weights
        # the part, and in it the token with a weight above 0, at which the running sum passes the goal
        goal, before, part = total * uniform[item], 0.0, 0
        while part + 1 < parts and before + sums[part] <= goal:
            before, part = before + sums[part], part + 1
        found = 0
        for i in range(part * SUMMED, min((part + 1) * SUMMED, size)):
            weight = weight_of(logits[i], best, slope)
            if weight > np.float32(0.0):
                found, before = i, before + weight
                if before > goal:
                    break
        tokens[item] = found


ARGMAX = CpuKernel({torch.float32: argmax_f32})
DRAW = CpuKernel({torch.float32: draw_f32})
for each in (ARGMAX, DRAW):
    each.compile(torch.float32)  # now, and not in the first step


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = logits.shape
    values, ids = empty((rows,), torch.float32), empty((rows,), torch.int64)
    ARGMAX.launch(logits.dtype, rows, logits, values, ids, rows, size, logits.stride(0))
    return values, ids


def draw_rows(logits: Tensor, best: Tensor, group: RandomRows) -> Tensor:
    if group.width:
        return draw_rows_in_parts(logits, best, group)
    count, size = len(group.rows), logits.shape[1]
    parts, temperature = -(-size // SUMMED), group.temperature.clamp(min=MIN_TEMPERATURE)
    tokens, sums = empty((count,), torch.int64), empty((count, parts), torch.float32)
    DRAW.launch(
        logits.dtype, count, logits, best, group.rows, temperature, group.uniform, sums, tokens, count, size,
        logits.stride(0), parts,
    )  # fmt: skip
    return tokens


sample_rows = partial(sample_rows_plain, draw_rows)

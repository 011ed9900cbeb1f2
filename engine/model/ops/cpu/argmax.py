"""The likeliest token of each row on a CPU, in bfloat16: one pass over the logits as integers of the same order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    Kernel,
    as_bf16,
    as_f32,
    as_i64,
    device_function,
    empty,
    kernel,
    load,
    store,
    take,
)

PART = 1024  # logits whose largest is found before it is asked which one it was


@device_function
def order(bits: int) -> int:
    """An integer that is larger for a larger bfloat16 and largest for NaN; the same for both zeros."""
    if bits & 0x7FFF > 0x7F80:
        return 0x8000
    return bits if bits < 0x8000 else 0x8000 - bits


@kernel
def argmax_bf16(args: Any) -> None:
    logits, values, ids = as_bf16(args[1]), as_f32(args[2]), as_i64(args[3])
    rows, size, stride = args[4], args[5], args[6]
    while True:
        row = take(args, 1)
        if row >= rows:
            break
        start, top, found = row * stride, -0x10000, 0
        for part in range(0, size, PART):
            highest = -0x10000
            for i in range(part, min(part + PART, size)):
                highest = max(highest, order(logits[start + i]))
            if highest > top:
                top, found = highest, part
        while order(logits[start + found]) != top:
            found += 1
        store(values, row, load(logits, start + found))
        ids[row] = found


ARGMAX = Kernel({torch.bfloat16: argmax_bf16})


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = logits.shape
    values, ids = empty((rows,), torch.float32), empty((rows,), torch.int64)
    ARGMAX.launch(logits.dtype, rows, logits, values, ids, rows, size, logits.stride(0))
    return values, ids

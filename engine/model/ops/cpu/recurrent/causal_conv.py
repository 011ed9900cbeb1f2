"""The causal convolution of recurrent layers on a CPU. See ops/recurrent/causal_conv.py for names.

An item of work is BLOCK channels of one sequence. It reads inputs of earlier steps from the sequence's ring before it
writes to the ring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.cpu.kernel import (
    as_f32,
    as_i64,
    device_function,
    each_dtype,
    empty,
    exp,
    load,
    store,
    work,
)  # fmt: skip
from engine.model.ops.cpu.recurrent.sequences import SEQUENCE_BYTES, sequence_table
from engine.model.state import RING, States

BLOCK = 256  # channels


@device_function
def copy_row(as_x: Any, target: int, source: int, width: int) -> None:
    for c in range(width):
        store(as_x(target), c, load(as_x(source), c))


@device_function
def causal_conv_rows(as_x: Any, size: int, args: Any) -> None:
    """Convolve, item by item. size: bytes of a number. args: x, its row stride, weight, bias, ring, out, table of
    sequences, channels, kernel, whether SiLU follows, the ring's slot stride; strides in numbers."""
    stride, seqs, channels, taps = args[2], as_i64(args[7])[0], args[8], args[9]
    blocks = (channels + BLOCK - 1) // BLOCK
    memory = np.zeros((RING + 2) * BLOCK, np.float32)
    weights, sums, zeros = memory.ctypes.data, as_f32(memory.ctypes.data + 4 * RING * BLOCK), 4 * (RING + 1) * BLOCK
    zeros += weights
    for item in work(args, seqs * blocks):
        seq, begin = as_i64(args[7] + SEQUENCE_BYTES * (1 + item // blocks)), item % blocks * BLOCK
        first, last, start, width = seq[0], seq[1], seq[2], min(BLOCK, channels - begin)
        ring, x = args[5] + size * (seq[3] * args[11] + begin), args[1] + size * begin
        for j in range(taps):
            for c in range(width):
                as_f32(weights)[j * BLOCK + c] = load(as_x(args[3]), (begin + c) * taps + j)
        for row in range(first, last):
            for c in range(width):
                sums[c] = np.float32(0.0)
            if args[4]:
                for c in range(width):
                    sums[c] = load(as_x(args[4]), begin + c)
            for j in range(taps):
                back = taps - 1 - j
                position, source = start + row - first - back, zeros
                if position >= start:
                    source = x + size * (row - back) * stride
                elif position >= 0:
                    source = ring + size * (position % RING) * channels
                column = as_f32(weights + 4 * j * BLOCK)
                for c in range(width):
                    sums[c] += column[c] * load(as_x(source), c)
            out = as_x(args[6] + size * (row * channels + begin))
            if args[10]:
                for c in range(width):
                    sums[c] /= np.float32(1.0) + exp(-sums[c])
            for c in range(width):
                store(out, c, sums[c])
        if seq[4] >= 0:
            saved = args[5] + size * (seq[5] * args[11] + begin)
            for position in range(seq[4] - taps + 1, seq[4]):
                source = ring + size * (position % RING) * channels
                if position >= start:
                    source = x + size * (first + position - start) * stride
                copy_row(as_x, saved + size * (position % RING) * channels, source, width)
        for row in range(max(first, last - RING), last):
            position = start + row - first
            copy_row(as_x, ring + size * (position % RING) * channels, x + size * row * stride, width)
    memory[0] = np.float32(0.0)  # Numba frees an array after its last use, and does not see the pointers into it


CAUSAL_CONV = each_dtype(causal_conv_rows)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool) -> Tensor:
    """Convolve. x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None. Returns a tensor like
    x."""
    table, x = sequence_table(batch), x if x.stride(1) == 1 else x.contiguous()
    channels, taps = weight.shape
    out = empty(x.shape, x.dtype)
    CAUSAL_CONV.launch(
        x.dtype, (len(table) - 1) * -(-channels // BLOCK), x, x.stride(0), weight.contiguous(),
        0 if bias is None else bias, states["conv"], out, table, channels, taps, int(silu), states["conv"].stride(0),
    )  # fmt: skip
    return out

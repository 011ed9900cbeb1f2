"""The steps before and after the linear attention of Mamba-2 on a CPU. See ops/recurrent/mamba2.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.cpu.kernel import (
    TokenCount,
    as_f32,
    constants,
    device_function,
    each_dtype,
    empty,
    exp,
    load,
    store,
    sum_of_squares,
    work,
)
from engine.model.ops.cpu.recurrent.gates import softplus
from engine.model.ops.elementwise.norms import GroupNorm

TOKENS = 2  # tokens that a thread takes at a time
LARGEST = 3e38  # in place of infinity, which kernels are compiled without


@device_function
def step_rows(as_x: Any, args: Any) -> None:
    """Compute decays and values. args: x, dt, log_rate, bias, limits, decay, values, tokens, heads, d_v, strides of x
    and dt from token to token."""
    x, dt, log_rate, bias, limits = as_x(args[1]), as_x(args[2]), as_f32(args[3]), as_f32(args[4]), as_f32(args[5])
    decay, values, tokens, heads, size = as_f32(args[6]), as_f32(args[7]), args[8], args[9], args[10]
    for token in work(args, tokens, TOKENS):
        for head in range(heads):
            step = softplus(load(dt, token * args[12] + head) + bias[head])
            step = min(max(step, limits[0]), limits[1])
            decay[token * heads + head] = -exp(log_rate[head]) * step
            source, target = token * args[11] + head * size, (token * heads + head) * size
            for i in range(size):
                values[target + i] = load(x, source + i) * step


@device_function
def open_gates(y: Any, z: Any, of_z: Any, width: Any) -> None:
    """Multiply a token's values by SiLU of its gates."""
    one = np.float32(1.0)
    for i in range(width):
        gate = load(z, of_z + i)
        y[i] *= gate / (one + exp(-gate))


@device_function
def gated_rows(as_x: Any, args: Any) -> None:
    """Gate and norm the outputs, overwriting y. args: y, x, z, skip, weight or 0 for no norm, `eps`, out, tokens,
    heads, d_v, groups, 1 if the gate is applied after the norm, strides of x and z from token to token."""
    x, z, skip, out, eps = as_x(args[2]), as_x(args[3]), as_f32(args[4]), as_x(args[7]), as_f32(args[6])[0]
    tokens, heads, size, gate_last = args[8], args[9], args[10], args[12]
    width, group, one = heads * size, heads * size // args[11], np.float32(1.0)
    for token in work(args, tokens, TOKENS):
        y, of_x, of_z, target = (
            as_f32(args[1] + 4 * token * width),
            token * args[13],
            token * args[14],
            token * width,
        )
        for head in range(heads):
            share = skip[head]
            for i in range(head * size, (head + 1) * size):
                y[i] += share * load(x, of_x + i)
        if not gate_last:
            open_gates(y, z, of_z, width)
        if args[5]:
            weight = as_x(args[5])
            for start in range(0, width, group):
                scale = one / np.sqrt(sum_of_squares(y, start, group) / np.float32(group) + eps)
                for i in range(start, start + group):
                    y[i] = y[i] * scale * load(weight, i)
        if gate_last:
            open_gates(y, z, of_z, width)
        for i in range(width):
            store(out, target + i, y[i])


STEPS = each_dtype(step_rows)
GATED = each_dtype(gated_rows)


def steps(x: Tensor, dt: Tensor, log_rate: Tensor, bias: Tensor, limit: tuple[float, float]) -> tuple[Tensor, Tensor]:
    tokens, heads = dt.shape
    size = x.shape[1] // heads
    decay, values = empty((tokens, heads, 1), torch.float32), empty((tokens, heads, size), torch.float32)
    STEPS.launch(
        x.dtype, -(-tokens // TOKENS), x, dt, log_rate, bias, constants(limit[0], min(limit[1], LARGEST)), decay,
        values, TokenCount(tokens), heads, size, x.stride(0), dt.stride(0),
    )  # fmt: skip
    return decay, values


def gated(y: Tensor, x: Tensor, z: Tensor, skip: Tensor, norm: GroupNorm | None) -> Tensor:
    out, (tokens, heads, size) = empty(x.shape, x.dtype), y.shape
    GATED.launch(
        x.dtype, -(-tokens // TOKENS), y, x, z, skip, 0 if norm is None else norm.weight,
        constants(norm.eps if norm else 0.0), out, TokenCount(tokens), heads, size, norm.groups if norm else 1,
        int(norm is not None and norm.gate_last), x.stride(0), z.stride(0),
    )  # fmt: skip
    return out

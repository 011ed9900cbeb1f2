"""Gated activations on a GPU, in Triton: one pass over both halves. See ops/activation.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.config_parts.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.model.ops.gpu import dependent_launch

BLOCK = 1024


@triton.jit
def gated(gate, value, GELU: tl.constexpr):
    """Return act(gate) * value, in float32."""
    # (1 + tanh(u)) / 2 is the sigmoid of 2u; u = sqrt(2 / pi) (gate + 0.044715 gate^3) for GELU
    steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(steep) * value


@triton.jit
def gated_kernel(x, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Compute act(x[:, :size]) * x[:, size:]. Grid (tokens, size / BLOCK)."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x += token * 2 * size
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + i, gated(gate, value, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swigluoai_kernel(
    x, out, size, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Compute `swigluoai` of interleaved gates and values. Grid (tokens, size / BLOCK)."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x += token * 2 * size
    gate = tl.minimum(tl.load(x + 2 * i, mask=inside, other=0.0).to(tl.float32), LIMIT)
    value = tl.clamp(tl.load(x + 2 * i + 1, mask=inside, other=0.0).to(tl.float32), -LIMIT, LIMIT)
    result = gate * tl.sigmoid(ALPHA * gate) * (value + 1.0)
    tl.store(out + token * size + i, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def relu2_kernel(x, out, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Compute relu(x) ** 2. Grid (tokens, size / BLOCK)."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + token * size + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value < 0.0, 0.0, value)  # NaN stays NaN
    tl.store(out + token * size + i, (value * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def open_gate_kernel(
    x, gate, out, size, stride, head_stride, value_stride, head_dim, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False
):  # fmt: skip
    """Compute x * sigmoid(gate). Grid (tokens, size / BLOCK). stride, head_stride, value_stride: of the gates' tokens,
    heads and values."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + token * size + i, mask=inside, other=0.0)
    place = token * stride + i // head_dim * head_stride + i % head_dim * value_stride
    opened = tl.sigmoid(tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
    tl.store(out + token * size + i, (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    return launch(gated_kernel, x, x.shape[1] // 2, GELU=False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    return launch(gated_kernel, x, x.shape[1] // 2, GELU=True)


def swigluoai_mul(x: Tensor) -> Tensor:
    return launch(swigluoai_kernel, x, x.shape[1] // 2, ALPHA=SWIGLU_ALPHA, LIMIT=SWIGLU_LIMIT)


def relu2(x: Tensor) -> Tensor:
    return launch(relu2_kernel, x, x.shape[1])


def launch(kernel: Any, x: Tensor, size: int, **constants: float) -> Tensor:
    """Return what a kernel computes of x: [tokens, size]."""
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    grid = len(x), triton.cdiv(size, BLOCK)
    kernel[grid](x, out, size, BLOCK=BLOCK, **constants, **dependent_launch.options(x.device))
    return out


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x [tokens, heads * head_dim], contiguous, times the sigmoid of gate [tokens, heads, head_dim], with any
    strides."""
    out, size = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[1]
    open_gate_kernel[x.shape[0], triton.cdiv(size, BLOCK)](
        x, gate, out, size, *gate.stride(), gate.shape[2], BLOCK=BLOCK, **dependent_launch.options(x.device)
    )  # fmt: skip
    return out


GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "swigluoai": swigluoai_mul,
    "relu2": relu2,
}

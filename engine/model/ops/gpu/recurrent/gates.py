"""Decays and shares of the delta rule in one Triton kernel. See ops/recurrent/gates.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.ops.gpu import dependent_launch

BLOCK = 1024


@triton.jit
def gates_kernel(
    a, b, log_rate, bias, decay, share, a_stride, b_stride,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, HEADS_PAD: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Grid (tokens, HEADS * CHANNELS / BLOCK)."""
    dependent_launch.begin(DEPENDENT)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HEADS * CHANNELS
    x = tl.load(a + token * a_stride + i, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + i, mask=inside, other=0.0)
    power = tl.exp(x)
    steps = tl.where(x > 20.0, x, tl.where(x < -15.0, power, tl.log(1.0 + power)))  # softplus
    rate = tl.exp(tl.load(log_rate + i // CHANNELS, mask=inside, other=0.0))
    tl.store(decay + token * HEADS * CHANNELS + i, -rate * steps, mask=inside)
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PAD)
        gate = tl.load(b + token * b_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
        tl.store(share + token * HEADS + head, tl.sigmoid(gate), mask=head < HEADS)


def gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """a: [tokens, heads * channels]; b: [tokens, heads]; each token's values contiguous. Returns decay [tokens, heads,
    channels] and share [tokens, heads], float32."""
    tokens, heads = b.shape
    channels = a.shape[1] // heads
    decay = torch.empty(tokens, heads, channels, dtype=torch.float32, device=a.device)
    share = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    block = min(BLOCK, triton.next_power_of_2(heads * channels))
    gates_kernel[tokens, triton.cdiv(heads * channels, block)](
        a, b, log_rate, bias, decay, share, a.stride(0), b.stride(0),
        HEADS=heads, CHANNELS=channels, HEADS_PAD=triton.next_power_of_2(heads), BLOCK=block,
        **dependent_launch.options(a.device),
    )  # fmt: skip
    return decay, share

"""Causal depthwise convolution over each sequence's tokens.

causal_conv(x, weight, bias, states, batch, silu) -> like x, contiguous
    out[t] = sum over j < kernel of weight[:, j] * x[t - kernel + 1 + j] + bias, and SiLU of that, in float32; what
    lies before a sequence's first token is 0
    x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None
    states: `conv` [slots, RING, channels] of x's dtype, the input of position p at p % RING
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.batch import Batch, state_rows
from engine.model.ops import activation
from engine.model.state import RING, States


class CausalConv(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool, /
    ) -> Tensor: ...


def select(dtype: torch.dtype, device: torch.device) -> CausalConv:
    """The fastest version."""
    return causal_conv_plain


def causal_conv_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool
) -> Tensor:
    """x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None. Returns x's shape and dtype."""
    out, kernel, ring = torch.zeros_like(x), weight.shape[1], states["conv"]
    for seq in state_rows(batch):
        count, known = seq.last - seq.first, min(seq.start, kernel - 1)
        before = torch.zeros(kernel - 1, x.shape[1], dtype=x.dtype, device=x.device)
        before[kernel - 1 - known :] = ring[seq.slot, torch.arange(seq.start - known, seq.start) % RING]
        inputs = torch.cat((before, x[seq.first : seq.last]))  # from position seq.start - kernel + 1 on
        total = torch.zeros(count, x.shape[1], device=x.device) if bias is None else bias.float()
        for j, column in enumerate(weight.float().unbind(1)):
            total = total + column * inputs[j : j + count].float()
        out[seq.first : seq.last] = (activation.silu(total) if silu else total).to(x.dtype)
        write_ring(ring[seq.slot], x[seq.first : seq.last], seq.start)
        if seq.save_at >= 0:
            last = inputs[: seq.save_at - seq.start + kernel - 1][1 - kernel :]
            write_ring(ring[seq.save_slot], last, seq.save_at - kernel + 1)
    return out


def write_ring(ring: Tensor, inputs: Tensor, start: int) -> None:
    """Write the last inputs of those from position `start` on."""
    inputs, start = inputs[-RING:], start + max(0, len(inputs) - RING)
    ring[torch.arange(start, start + len(inputs), device=ring.device) % RING] = inputs

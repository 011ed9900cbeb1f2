"""Causal depthwise convolution over each sequence's tokens.

causal_conv(x, weight, bias, states, batch, silu) -> like x, contiguous
    out[t] = sum over j < kernel of weight[:, j] * x[t - kernel + 1 + j] + bias, followed by SiLU if `silu`, in float32.
    Inputs before a sequence's first token are 0.
    x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None
    states: `conv` [slots, RING, channels] of x's dtype, the input of position p at index p % RING
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops import dispatch
from engine.model.ops.elementwise import gates
from engine.model.state import RING, StateRows, States, state_rows


class CausalConvOp(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool, /
    ) -> Tensor: ...


def select(dtype: torch.dtype, device: torch.device) -> CausalConvOp:
    """Return the fastest version."""
    if dispatch.cpu_kernels(dtype, device):
        from engine.model.ops.cpu.recurrent import causal_conv as cpu

        cpu.CAUSAL_CONV.compile(dtype)
        return cpu.causal_conv
    if dispatch.gpu_kernels(dtype, device):
        from engine.model.ops.gpu.recurrent import causal_conv as gpu

        return gpu.causal_conv
    return causal_conv_plain


@dataclass(frozen=True, slots=True)
class Begins:
    """The rows of a step that share inputs with other steps. All tensors are [n] int64 except `back`.

    `rows` are the first rows of each sequence, at most kernel - 1, which read inputs of earlier steps. `last_rows` are
    the last rows of each sequence, which later steps read.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    back: Tensor  #: [n, 1], how many rows of the sequence in this step come before each row
    last_rows: Tensor
    last_slots: Tensor
    last_positions: Tensor
    saved: list[StateRows]

    @classmethod
    def of(cls, batch: Batch, kernel: int) -> Begins:
        seqs = state_rows(batch)
        first = [(s.first + i, s.slot, s.start + i, i) for s in seqs for i in range(min(kernel - 1, s.last - s.first))]
        last = [
            (row, s.slot, s.start + row - s.first) for s in seqs for row in range(max(s.first, s.last - RING), s.last)
        ]
        device = batch.query_start.device
        rows, slots, positions, back = torch.tensor(first, dtype=torch.int64, device=device).reshape(-1, 4).unbind(1)
        last_places = torch.tensor(last, dtype=torch.int64, device=device).reshape(-1, 3)
        last_rows, last_slots, last_positions = last_places.unbind(1)
        saved = [seq for seq in seqs if seq.save_at >= 0]
        return cls(rows, slots, positions, back[:, None], last_rows, last_slots, last_positions, saved)


def causal_conv_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool
) -> Tensor:
    """Convolve. x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None. Returns x's shape and
    dtype."""
    assert batch.states is not None
    kernel, ring, plans = weight.shape[1], states["conv"], batch.states.plans
    if ("conv", kernel) not in plans:
        plans["conv", kernel] = Begins.of(batch, kernel)
    begins: Begins = plans["conv", kernel]
    columns, start = weight.float().unbind(1), 0.0 if bias is None else bias.float()

    def convolved(inputs: list[Tensor]) -> Tensor:
        """Return the weighted sum of `inputs`, a list with one tensor of rows for each column of the weight."""
        total = start + columns[0] * inputs[0].float()
        for column, tap in zip(columns[1:], inputs[1:], strict=True):
            total = total + column * tap.float()
        return (gates.silu(total) if silu else total).to(x.dtype)

    out, taps = torch.zeros_like(x, memory_format=torch.contiguous_format), []
    if len(begins.rows) < len(x):
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        out = convolved([padded[j : j + len(x)] for j in range(kernel)])
    for distance in range(kernel - 1, -1, -1):
        positions = begins.positions - distance
        kept = ring[begins.slots, positions % RING].masked_fill(positions[:, None] < 0, 0)
        taps.append(torch.where(begins.back >= distance, x[(begins.rows - distance).clamp(min=0)], kept))
    out[begins.rows] = convolved(taps)
    for seq in begins.saved:
        save(x, ring, seq, kernel)
    ring[begins.last_slots, begins.last_positions % RING] = x[begins.last_rows]
    return out


def save(x: Tensor, ring: Tensor, seq: StateRows, kernel: int) -> None:
    """Write to a snapshot's slot the inputs before a border that this step reaches. They come from x, or, if they are
    older, from the ring."""
    for position in range(seq.save_at - kernel + 1, seq.save_at):
        row = seq.first + position - seq.start
        ring[seq.save_slot, position % RING] = x[row] if position >= seq.start else ring[seq.slot, position % RING]

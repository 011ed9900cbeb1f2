"""The causal convolution of recurrent layers in Triton. See ops/recurrent/causal_conv.py, whose names are used here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import Batch
from engine.model.ops.gpu import dependent_launch
from engine.model.state import RING, States

ROWS, CHANNELS = 16, 128  # of a program


@triton.jit(do_not_specialize=["tokens", "seqs", "halvings"])
def causal_conv_kernel(
    x, weight, bias, ring, out, query_start, kv_len, slots, save_at, save_slots,
    tokens, seqs, halvings, channels, stride, ring_stride,
    TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Grid (tokens / ROWS, channels / CHANNELS). Also writes to the ring, unless a sequence has so many rows that they
    would overwrite inputs that are still needed. `keep_kernel` writes the rows of such sequences."""
    dependent_launch.begin(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seq, beyond = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + seqs
    for _ in range(0, halvings):  # the last sequence that begins at or before each row
        middle = (seq + beyond) // 2
        after = tl.load(query_start + middle) > row
        seq, beyond = tl.where(after, seq, middle), tl.where(after, middle, beyond)
    first, last = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    end = tl.load(kv_len + seq)
    here = (row < tokens) & (row >= first) & (row < last) & (end > 0)
    start = end - last + first
    position = start + row - first
    slot, at = tl.load(slots + seq).to(tl.int64), tl.load(save_at + seq)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (c < channels)[None, :]
    home = ring + (slot * ring_stride)[:, None] + c[None, :]
    saved = ring + (tl.load(save_slots + seq).to(tl.int64) * ring_stride)[:, None] + c[None, :]
    source = x + row.to(tl.int64)[:, None] * stride + c[None, :]

    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    if BIASED:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        of_step = here & (row - back >= first)
        kept = here & (row - back < first) & (position >= back)
        place = ((position - back + RING) % RING * channels)[:, None]
        old = tl.load(home + place, mask=kept[:, None] & inside, other=0.0)
        value = tl.load(source - back * stride, mask=of_step[:, None] & inside, other=0.0) + old
        total += tl.load(weight + c * TAPS + tap, mask=c < channels, other=0.0).to(tl.float32)[None, :] * value
        # the first row of a sequence saves what came before this step
        copied = kept & (row == first) & (back > 0) & (position - back >= at - TAPS + 1) & (at >= 0)
        tl.store(saved + place, old, mask=copied[:, None] & inside)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    target = out + row.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=here[:, None] & inside)

    own = tl.load(source, mask=here[:, None] & inside, other=0.0)
    place = (position % RING * channels)[:, None]
    tl.store(home + place, own, mask=(here & (last - first <= RING - TAPS + 1))[:, None] & inside)
    reaches = here & (position >= at - TAPS + 1) & (position < at)
    tl.store(saved + place, own, mask=reaches[:, None] & inside)


@triton.jit
def keep_kernel(
    x, ring, query_start, kv_len, slots, channels, stride, ring_stride,
    TAPS: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Grid (seqs, channels / CHANNELS). Writes the last rows of each longer sequence to its ring."""
    dependent_launch.begin(DEPENDENT)
    seq = tl.program_id(0)
    first, last, end = tl.load(query_start + seq), tl.load(query_start + seq + 1), tl.load(kv_len + seq)
    if (end == 0) | (last - first <= RING - TAPS + 1):
        return
    back = 1 + tl.arange(0, RING)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (last - back >= first)[:, None] & (c < channels)[None, :]
    own = tl.load(x + (last - back).to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    home = ring + tl.load(slots + seq).to(tl.int64) * ring_stride
    place = ((end - back + RING) % RING * channels)[:, None] + c[None, :]
    tl.store(home + place, own, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: States, batch: Batch, silu: bool) -> Tensor:
    """x: [tokens, channels]; weight: [channels, kernel]; bias: [channels] or None. Returns x's shape and dtype."""
    assert batch.states is not None
    found, ring, (channels, taps) = batch.states, states["conv"], weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out, seqs, blocks = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        len(batch.kv_len),
        -(-channels // CHANNELS),
    )
    causal_conv_kernel[triton.cdiv(len(x), ROWS), blocks](
        x, weight, weight if bias is None else bias, ring, out, batch.query_start, batch.kv_len, found.slots,
        found.save_at, found.save_slots, len(x), seqs, seqs.bit_length(), channels, x.stride(0), ring.stride(0),
        TAPS=taps, BIASED=bias is not None, SILU=silu, RING=RING, ROWS=ROWS, CHANNELS=CHANNELS,
        **dependent_launch.options(x.device),
    )  # fmt: skip
    if any(chunk.count > RING - taps + 1 for chunk in batch.chunks):
        keep_kernel[seqs, blocks](
            x, ring, batch.query_start, batch.kv_len, found.slots, channels, x.stride(0), ring.stride(0),
            TAPS=taps, RING=RING, CHANNELS=CHANNELS, **dependent_launch.options(x.device),
        )  # fmt: skip
    return out

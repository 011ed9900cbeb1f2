"""The block formats of ggml, which GGUF files use. A row of a weight is a sequence of blocks of 32 or 256 numbers, each
a few bytes of small integers, scales and minima. Tests compare with the NumPy code of the package `gguf` (quants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantization.e2m1 import doubled, half_scale
from engine.model.quantization.format import QuantAxis, StoredTensor, per_group, trim
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import INPUTS, OUTPUTS, Shard

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Codes = tuple[Tensor, Tensor, Tensor | None]
"""Decoded blocks: values [rows, blocks, numbers] int8, scale and zero [rows, blocks, groups] float32. A number is
(value - zero) * scale."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types: how its numbers are stored in blocks."""

    numbers: int
    """Numbers in a block."""
    bytes: int
    """Bytes of a block."""
    group: int
    """Number of neighbouring numbers that share a scale."""
    bits: int
    """Bits per value in our kernels, 4 or 8."""
    unpack: Callable[[Tensor], Codes]


def halves(blocks: Tensor, start: int) -> Tensor:
    """Read the float16 at byte `start` of each block: [..., 1] float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Unpack [..., bytes] to [..., 2 * bytes] uint8. Each `run` bytes give low nibbles, then high ones."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(-3)


def bits(packed: Tensor, width: int) -> Tensor:
    """Unpack [..., bytes] to [..., 8 / width, bytes] uint8: the fields of `width` bits, the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return packed[..., None, :] >> shifts[:, None] & (1 << width) - 1


def with_minimum(values: Tensor, middle: int, scale: Tensor, minimum: Tensor) -> Codes:
    """Return the codes of numbers `value * scale + minimum`. values: unsigned. scale: 0 for a group of equal numbers.
    middle: number to subtract from the values to make them signed."""
    flat = scale == 0
    zero = torch.where(flat, -1.0, -minimum / torch.where(flat, 1.0, scale) - middle)
    groups = values.unflatten(-1, (scale.shape[-1], -1)).to(torch.int8) - middle
    return groups.masked_fill(flat[..., None], 0).flatten(-2), torch.where(flat, minimum, scale), zero


def unpack_q4_0(blocks: Tensor) -> Codes:
    return nibbles(blocks[..., 2:], 16).to(torch.int8) - 8, halves(blocks, 0), None


def unpack_q4_1(blocks: Tensor) -> Codes:
    return with_minimum(nibbles(blocks[..., 4:], 16), 8, halves(blocks, 0), halves(blocks, 2))


def fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Unpack the 32 fifth bits in the four bytes at `start` of each block: [..., 32] uint8, each 16 or 0."""
    return bits(blocks[..., start : start + 4], 1).mT.flatten(-2) << 4


def unpack_q5_0(blocks: Tensor) -> Codes:
    return (nibbles(blocks[..., 6:], 16) | fifth_bits(blocks, 2)).to(torch.int8) - 16, halves(blocks, 0), None


def unpack_q5_1(blocks: Tensor) -> Codes:
    values = nibbles(blocks[..., 8:], 16) | fifth_bits(blocks, 4)
    return with_minimum(values, 16, halves(blocks, 0), halves(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> Codes:
    return blocks[..., 2:].contiguous().view(torch.int8), halves(blocks, 0), None


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of Q4_K's and Q5_K's eight groups, [..., 8] float32. Each is stored in six bits, 12
    bytes in all."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((low & 63, high & 15 | low >> 2 & 48), dim=-1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), dim=-1)
    return halves(blocks, 0) * scale, -halves(blocks, 2) * minimum


def unpack_q4_k(blocks: Tensor) -> Codes:
    return with_minimum(nibbles(blocks[..., 16:], 32), 8, *scales_and_minima(blocks))


def unpack_q5_k(blocks: Tensor) -> Codes:
    fifth = bits(blocks[..., 16:48], 1).flatten(-2) << 4
    return with_minimum(nibbles(blocks[..., 48:], 32) | fifth, 16, *scales_and_minima(blocks))


def unpack_q6_k(blocks: Tensor) -> Codes:
    upper = bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3) << 4
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float() * halves(blocks, 208)
    return (nibbles(blocks[..., :128], 64) | upper).to(torch.int8) - 32, scale, None


def unpack_q3_k(blocks: Tensor) -> Codes:
    values = bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    third = bits(blocks[..., :32], 1).flatten(-2) << 2  # set where nothing is subtracted
    low, high = bits(blocks[..., 96:104], 4).flatten(-2), bits(blocks[..., 104:108], 2).flatten(-2)
    scale = (low | high << 4).to(torch.int8) - 32
    return (values | third).to(torch.int8) - 4, scale * halves(blocks, 108), None


def unpack_q2_k(blocks: Tensor) -> Codes:
    values = bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3)
    scale, minimum = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return with_minimum(values, 2, scale * halves(blocks, 80), minimum * -halves(blocks, 82))


def nonlinear(codes: Tensor) -> Tensor:
    """Return the values of the 16 codes of IQ4_NL and IQ4_XS, which are closer to each other near 0."""
    table = torch.tensor(NONLINEAR, dtype=torch.int8, device=codes.device)
    return table[codes.long()]


def unpack_iq4_nl(blocks: Tensor) -> Codes:
    return nonlinear(nibbles(blocks[..., 2:], 16)), halves(blocks, 0), None


def unpack_iq4_xs(blocks: Tensor) -> Codes:
    high = bits(blocks[..., 2:4], 2).mT.flatten(-2)
    low = nibbles(blocks[..., 4:8], 1)
    scale = (low | high << 4).to(torch.int8) - 32
    return nonlinear(nibbles(blocks[..., 8:], 16)), scale * halves(blocks, 0), None


def unpack_mxfp4(blocks: Tensor) -> Codes:
    return doubled(nibbles(blocks[..., 1:], 16)), half_scale(blocks[..., :1]), None


TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 32, 4, unpack_q4_0),
    "Q4_1": BlockType(32, 20, 32, 4, unpack_q4_1),
    "Q5_0": BlockType(32, 22, 32, 8, unpack_q5_0),
    "Q5_1": BlockType(32, 24, 32, 8, unpack_q5_1),
    "Q8_0": BlockType(32, 34, 32, 8, unpack_q8_0),
    "Q4_K": BlockType(256, 144, 32, 4, unpack_q4_k),
    "Q5_K": BlockType(256, 176, 32, 8, unpack_q5_k),
    "Q6_K": BlockType(256, 210, 16, 8, unpack_q6_k),
    "Q3_K": BlockType(256, 110, 16, 8, unpack_q3_k),
    "Q2_K": BlockType(256, 84, 16, 8, unpack_q2_k),
    "IQ4_NL": BlockType(32, 18, 32, 8, unpack_iq4_nl),
    "IQ4_XS": BlockType(256, 136, 32, 8, unpack_iq4_xs),
    "MXFP4": BlockType(32, 17, 32, 8, unpack_mxfp4),
}


def unpack(blocks: Tensor, type: str) -> QuantizedWeight:
    """Decode blocks [rows, blocks, bytes] uint8 to a weight [rows, numbers]."""
    values, scale, zero = TYPES[type].unpack(blocks)
    zeros = None if zero is None else zero.flatten(1)
    return QuantizedWeight(values.flatten(1), scale.flatten(1), zeros, TYPES[type].bits, None)


@dataclass(frozen=True, slots=True)
class GGML:
    """Weights stored as `weight` [outputs, blocks, bytes], in blocks of one type along the inputs."""

    type: str

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        blocks = QuantAxis(INPUTS, TYPES[self.type].numbers)
        return {"weight": StoredTensor(torch.uint8, (QuantAxis(OUTPUTS), blocks, TYPES[self.type].bytes))}

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        whole, blocks = unpack(tensors["weight"], self.type), QuantAxis(INPUTS, TYPES[self.type].numbers)
        values = trim(whole.values, 1, weight, blocks).contiguous()
        groups = [None if entries is None else self.trim(entries, weight) for entries in (whole.scale, whole.zero)]
        assert groups[0] is not None
        return QuantizedWeight(values, groups[0], groups[1], whole.bits, None)

    def trim(self, entries: Tensor, weight: Shard) -> Tensor:
        """Cut scales of whole blocks to those of the shard's groups. If the shard cuts a group, return one scale per
        column."""
        blocks, groups = QuantAxis(INPUTS, TYPES[self.type].numbers), QuantAxis(INPUTS, TYPES[self.type].group)
        skipped = blocks.span(weight)[0] * (blocks.unit // groups.unit)
        first, stop, _ = groups.span(weight)
        return per_group(entries[:, first - skipped : stop - skipped], weight, groups.unit).contiguous()

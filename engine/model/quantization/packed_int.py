"""Weights of four or eight bits that are packed into int32 words, with scales for groups of inputs: the formats of AWQ,
GPTQ and compressed-tensors' `pack-quantized`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantization.format import INPUTS, OUTPUTS, Axis, Field, Piece, cut, per_group
from engine.model.quantization.packing import AWQ_NIBBLES, unpack
from engine.model.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class PackedInt:
    """bits: 4 or 8. group_size: inputs that share a scale; None: all. ordered: whether a tensor tells the group of each
    input, since the columns of large activations were quantized first."""

    bits: int
    group_size: int | None
    ordered: bool = False

    @property
    def word(self) -> int:
        """Values in one int32."""
        return 32 // self.bits

    def group(self, piece: Piece) -> int:
        return self.group_size or piece.inputs

    def groups(self, piece: Piece) -> Axis | int:
        """The dimension of scales and zero points that runs along the inputs. With an order of their own, a rank's
        inputs may be of any group: it needs all."""
        return -(-piece.inputs // self.group(piece)) if self.ordered else Axis(INPUTS, self.group(piece))

    def weight(
        self, values: Tensor, scale: Tensor, zero: Tensor | None, piece: Piece, order: Tensor | None = None
    ) -> QuantizedWeight:
        """values [rows, columns] and zero [rows, entries]: unsigned; scale: [rows, entries]."""
        middle = 1 << self.bits - 1
        zeros = None if zero is None or bool((zero == middle).all()) else zero.float() - middle
        group = self.group(piece)
        return QuantizedWeight(
            values=(values - middle).to(torch.int8).contiguous(),
            scale=per_group(scale, piece, group, order).contiguous(),
            zero=None if zeros is None else per_group(zeros, piece, group, order).contiguous(),
            bits=self.bits,
            activations=None,
        )


@dataclass(frozen=True, slots=True)
class AWQ(PackedInt):
    """Activation-aware quantization, arXiv:2306.00978, as AutoAWQ writes it (version `gemm`): inputs as rows, and eight
    outputs in a word, in an order of its own."""

    def fields(self, piece: Piece) -> dict[str, Field]:
        outputs, groups = Axis(OUTPUTS, self.word), self.groups(piece)
        return {
            "qweight": Field(torch.int32, (Axis(INPUTS), outputs)),
            "qzeros": Field(torch.int32, (groups, outputs)),
            "scales": Field(torch.float32, (groups, Axis(OUTPUTS))),
        }

    def decode(self, tensors: dict[str, Tensor], piece: Piece) -> QuantizedWeight:
        values, zeros = (
            cut(unpack(tensors[name], self.bits, 1, AWQ_NIBBLES), 1, piece, OUTPUTS, self.word)
            for name in ("qweight", "qzeros")
        )
        return self.weight(values.T, tensors["scales"].T, zeros.T, piece)


@dataclass(frozen=True, slots=True)
class GPTQ(PackedInt):
    """GPTQ, arXiv:2210.17323, as AutoGPTQ and GPTQModel write it: inputs as rows, eight of them in a word.

    zero_offset: 1 where zero points are stored less one (format `gptq`), 0 where they are not (`gptq_v2`)
    """

    zero_offset: int = 1

    def fields(self, piece: Piece) -> dict[str, Field]:
        groups = self.groups(piece)
        fields = {
            "qweight": Field(torch.int32, (Axis(INPUTS, self.word), Axis(OUTPUTS))),
            "qzeros": Field(torch.int32, (groups, Axis(OUTPUTS, self.word))),
            "scales": Field(torch.float32, (groups, Axis(OUTPUTS))),
        }
        return fields | ({"g_idx": Field(torch.int32, (Axis(INPUTS),))} if self.ordered else {})

    def decode(self, tensors: dict[str, Tensor], piece: Piece) -> QuantizedWeight:
        values = cut(unpack(tensors["qweight"], self.bits, 0), 0, piece, INPUTS, self.word)
        zeros = cut(unpack(tensors["qzeros"], self.bits, 1), 1, piece, OUTPUTS, self.word) + self.zero_offset
        return self.weight(values.T, tensors["scales"].T, zeros.T, piece, tensors.get("g_idx"))


@dataclass(frozen=True, slots=True)
class PackQuantized(PackedInt):
    """compressed-tensors' `pack-quantized`: outputs as rows, inputs packed; zero points packed along the outputs."""

    zeros: bool = False

    def fields(self, piece: Piece) -> dict[str, Field]:
        groups = self.groups(piece)
        fields = {
            "weight_packed": Field(torch.int32, (Axis(OUTPUTS), Axis(INPUTS, self.word))),
            "weight_scale": Field(torch.float32, (Axis(OUTPUTS), groups)),
        }
        if self.zeros:
            fields["weight_zero_point"] = Field(torch.int32, (Axis(OUTPUTS, self.word), groups))
        return fields | ({"weight_g_idx": Field(torch.int32, (Axis(INPUTS),))} if self.ordered else {})

    def decode(self, tensors: dict[str, Tensor], piece: Piece) -> QuantizedWeight:
        values = cut(unpack(tensors["weight_packed"], self.bits, 1), 1, piece, INPUTS, self.word)
        zeros = None
        if self.zeros:
            zeros = cut(unpack(tensors["weight_zero_point"], self.bits, 0), 0, piece, OUTPUTS, self.word)
        return self.weight(values, tensors["weight_scale"], zeros, piece, tensors.get("weight_g_idx"))

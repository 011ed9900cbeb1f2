"""Formats that pack weights of four or eight bits into int32 words, with scales per group of inputs: AWQ, GPTQ and
compressed-tensors' `pack-quantized`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantization.format import QuantAxis, StoredTensor, per_group, trim
from engine.model.quantization.packing import AWQ_NIBBLES, unpack
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import INPUTS, OUTPUTS, Shard


@dataclass(frozen=True, slots=True)
class PackedInt:
    """The base class of these formats."""

    bits: int
    """4 or 8."""
    group_size: int | None
    """Number of inputs that share a scale; None for all inputs."""
    ordered: bool = False
    """Whether a tensor gives the group of each input, because inputs were quantized in another order (`desc_act`,
    `actorder`)."""

    @property
    def word(self) -> int:
        """Number of values in an int32 word."""
        return 32 // self.bits

    def group(self, weight: Shard) -> int:
        return self.group_size or weight.shape[INPUTS]

    def groups(self, weight: Shard) -> QuantAxis | int:
        """Return the dimension of scales and zero points along the inputs. If `ordered`, any group may contain inputs
        of this rank, so the rank reads all groups."""
        group = self.group(weight)
        return -(-weight.shape[INPUTS] // group) if self.ordered else QuantAxis(INPUTS, group)

    def quantized(
        self, values: Tensor, scale: Tensor, zero: Tensor | None, weight: Shard, order: Tensor | None = None
    ) -> QuantizedWeight:
        """Build the weight. values: [rows, columns], unsigned. scale, zero: [rows, entries]; zero is unsigned. order:
        see `per_group`."""
        middle = 1 << self.bits - 1
        zeros = None if zero is None or bool((zero == middle).all()) else zero.float() - middle
        group = self.group(weight)
        return QuantizedWeight(
            values=(values - middle).to(torch.int8).contiguous(),
            scale=per_group(scale, weight, group, order).contiguous(),
            zero=None if zeros is None else per_group(zeros, weight, group, order).contiguous(),
            bits=self.bits,
            activations=None,
        )


@dataclass(frozen=True, slots=True)
class AWQ(PackedInt):
    """Activation-aware quantization, arXiv:2306.00978, as AutoAWQ writes it (version `gemm`): rows are inputs, and a
    word has eight outputs in the order of AWQ_NIBBLES."""

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        outputs, groups = QuantAxis(OUTPUTS, self.word), self.groups(weight)
        return {
            "qweight": StoredTensor(torch.int32, (QuantAxis(INPUTS), outputs)),
            "qzeros": StoredTensor(torch.int32, (groups, outputs)),
            "scales": StoredTensor(torch.float32, (groups, QuantAxis(OUTPUTS))),
        }

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        values, zeros = (
            trim(unpack(tensors[name], self.bits, 1, AWQ_NIBBLES), 1, weight, QuantAxis(OUTPUTS, self.word))
            for name in ("qweight", "qzeros")
        )
        return self.quantized(values.T, tensors["scales"].T, zeros.T, weight)


@dataclass(frozen=True, slots=True)
class GPTQ(PackedInt):
    """GPTQ, arXiv:2210.17323, as AutoGPTQ and GPTQModel write it: rows are inputs, 32 / bits of them to a word."""

    zero_offset: int = 1
    """1 if zero points are stored less one (format `gptq`), else 0 (`gptq_v2`)."""

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        groups = self.groups(weight)
        tensors = {
            "qweight": StoredTensor(torch.int32, (QuantAxis(INPUTS, self.word), QuantAxis(OUTPUTS))),
            "qzeros": StoredTensor(torch.int32, (groups, QuantAxis(OUTPUTS, self.word))),
            "scales": StoredTensor(torch.float32, (groups, QuantAxis(OUTPUTS))),
        }
        return tensors | ({"g_idx": StoredTensor(torch.int32, (QuantAxis(INPUTS),))} if self.ordered else {})

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        values = trim(unpack(tensors["qweight"], self.bits, 0), 0, weight, QuantAxis(INPUTS, self.word))
        zeros = trim(unpack(tensors["qzeros"], self.bits, 1), 1, weight, QuantAxis(OUTPUTS, self.word))
        zeros = zeros.T + self.zero_offset
        return self.quantized(values.T, tensors["scales"].T, zeros, weight, tensors.get("g_idx"))


@dataclass(frozen=True, slots=True)
class PackQuantized(PackedInt):
    """compressed-tensors' `pack-quantized`: rows are outputs; words pack inputs, and for zero points outputs."""

    zeros: bool = False

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        groups = self.groups(weight)
        tensors = {
            "weight_packed": StoredTensor(torch.int32, (QuantAxis(OUTPUTS), QuantAxis(INPUTS, self.word))),
            "weight_scale": StoredTensor(torch.float32, (QuantAxis(OUTPUTS), groups)),
        }
        if self.zeros:
            tensors["weight_zero_point"] = StoredTensor(torch.int32, (QuantAxis(OUTPUTS, self.word), groups))
        return tensors | ({"weight_g_idx": StoredTensor(torch.int32, (QuantAxis(INPUTS),))} if self.ordered else {})

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        values = trim(unpack(tensors["weight_packed"], self.bits, 1), 1, weight, QuantAxis(INPUTS, self.word))
        zeros = None
        if self.zeros:
            zeros = trim(unpack(tensors["weight_zero_point"], self.bits, 0), 0, weight, QuantAxis(OUTPUTS, self.word))
        return self.quantized(values, tensors["weight_scale"], zeros, weight, tensors.get("weight_g_idx"))

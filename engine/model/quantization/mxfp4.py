"""MXFP4 of the OCP Microscaling Formats specification 1.0, with all experts of a layer in one tensor (gpt-oss)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.quantization.e2m1 import doubled, half_scale
from engine.model.quantization.format import QuantAxis, StoredTensor, StoredWeight
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import Shard

GROUP = 32  # neighbouring inputs with one scale
EXPERTS, OUTPUTS, INPUTS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Weights [experts, outputs, inputs] stored as `blocks`, two numbers to a byte, the first in the low bits, and
    `scales`, an exponent of 2 for every 32 inputs."""

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        axes = (QuantAxis(EXPERTS), QuantAxis(OUTPUTS), QuantAxis(INPUTS, GROUP))
        return {"blocks": StoredTensor(torch.uint8, (*axes, GROUP // 2)), "scales": StoredTensor(torch.uint8, axes)}

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        """Return the weights of all experts, stacked along the outputs."""
        blocks, scales = tensors["blocks"].flatten(0, 1), tensors["scales"].flatten(0, 1)
        values = doubled(torch.stack((blocks & 15, blocks >> 4), dim=-1)).flatten(1)
        scale = half_scale(scales)
        if weight.dim == INPUTS and (weight.start % GROUP or weight.size % GROUP):  # a shard that cuts a group
            start = weight.start % GROUP
            values = values[:, start : start + weight.size]
            scale = scale.repeat_interleave(GROUP, dim=1)[:, start : start + weight.size]
        return QuantizedWeight(values, scale, None, 8, None)

    @staticmethod
    def packed(stored: StoredWeight) -> PackedExperts | None:
        """Return this rank's shard of a weight in the stored form; None if the shard cuts a group."""
        ((name, weight),) = stored.weights.items()
        if weight.dim == INPUTS and (weight.start % GROUP or weight.size % GROUP):
            return None
        tensors = stored.tensors[name]
        return PackedExperts(tensors["blocks"], tensors["scales"], None, weight.local_shape[INPUTS])

    @staticmethod
    def dequantize(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of a weight, [experts, outputs, inputs]. Works expert by expert to save memory."""
        ((name, weight),) = stored.weights.items()
        tensors = stored.tensors[name]
        out = torch.empty(weight.local_shape, dtype=dtype, device=tensors["blocks"].device)
        for i, expert in enumerate(out):
            one = {ending: tensor[i : i + 1] for ending, tensor in tensors.items()}
            expert.copy_(stored.format.decode(one, weight).dequantize(dtype))
        return out

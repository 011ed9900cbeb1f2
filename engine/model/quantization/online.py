"""Rounds an unquantized checkpoint as it is loaded (option `quantization`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.quantization.format import QuantAxis, StoredTensor
from engine.model.quantization.method import Method
from engine.model.quantization.weight import FP8, QuantizedWeight, quantize_rows
from engine.model.shard import INPUTS, OUTPUTS, Shard

WEIGHT_AXES = (QuantAxis(OUTPUTS), QuantAxis(INPUTS))
INT4_GROUPS = (128, 64, 32)  # group sizes; the largest that divides a rank's inputs is used


@dataclass(frozen=True, slots=True)
class Online:
    """Weights stored unquantized as `weight`, which a rank rounds after reading its shard. FP8 and int8 have a scale
    per output, int4 a scale and a zero point per group of inputs."""

    method: Method
    group: int | None = None
    """Only for int8: number of inputs that share a scale. Activations are then not rounded. None means one scale per
    output."""

    def check(self, weight: Shard) -> None:
        """Raise ConfigError if this rank's shard of the weight cannot be rounded by this method."""
        inputs = weight.local_shape[INPUTS]
        if self.method == "int4" and inputs % INT4_GROUPS[-1]:
            limit = (
                f"fp8 or int8: a layer has {inputs} inputs on each rank, which is not a multiple of {INT4_GROUPS[-1]}"
            )
            raise ConfigError("quantization", self.method, limit)

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        self.check(weight)
        return {"weight": StoredTensor(None, WEIGHT_AXES)}

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        return self.quantize(tensors["weight"])

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Round a weight [outputs, inputs] by `method`."""
        if self.method == "int4":
            return quantize_int4(weight)
        dtype = FP8 if self.method == "fp8" else torch.int8
        values, scale = quantize_rows(weight, dtype, self.group)
        return QuantizedWeight(values, scale, None, 8, None if self.group else dtype)


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Round a weight [outputs, inputs] to int4: sixteen evenly spaced values from a group's smallest number to its
    largest. The range always includes 0."""
    size = next(size for size in INT4_GROUPS if weight.shape[1] % size == 0)
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low).clamp(min=1e-12) / 15
    zero = (-low / scale).round() - 8
    values = ((groups / scale[..., None]).round() + zero[..., None]).clamp(-8, 7)
    return QuantizedWeight(values.to(torch.int8).flatten(1), scale, zero, 4, None)

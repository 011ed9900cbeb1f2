"""Products with quantized weights.

select(weight, dtype) -> multiply(x, bias) -> [tokens, outputs]
    x and the result have `dtype`; `plain` is the oracle of every version. None means that no version exists for this
    weight, or that none would be faster. The weight is then dequantized as it is loaded.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.quantization.rows import QuantizedRows
from engine.model.quantization.weight import QuantizedWeight, quantize_rows

logger = logging.getLogger(__name__)


class Multiply(Protocol):
    def __call__(self, x: Tensor, bias: Tensor | None, /) -> Tensor: ...


def select(weight: QuantizedWeight, dtype: torch.dtype) -> Multiply | None:
    """Return the fast version for this weight on its device. Logs the choice once per kind of weight."""
    device = weight.values.device.type
    multiply: Multiply | None = None
    if dispatch.cpu_kernels(dtype, weight.values.device):
        from engine.model.ops.cpu import quantized_linear as cpu

        multiply = cpu.select(weight, dtype)
    elif device == "cuda":
        from engine.model.ops.gpu import quantized_linear as gpu

        multiply = gpu.select(weight, dtype)
    if multiply is None:
        log_once(f"{kind(weight)}: no kernel on {device}, dequantized to {str(dtype).removeprefix('torch.')} at load")
    else:
        log_once(f"{kind(weight)}: multiplied in quantized form on {device} ({type(multiply).__name__})")
    return multiply


def kind(weight: QuantizedWeight) -> str:
    values = "fp8" if weight.values.dtype.is_floating_point else f"int{weight.bits}"
    inputs = f" x {'fp8' if weight.activations.is_floating_point else 'int8'}" if weight.activations else ""
    scales = "output" if weight.scale.shape[1] == 1 else f"{weight.group_size} inputs"
    return f"{values}{inputs}, a scale per {scales}"


@cache
def log_once(what: str) -> None:
    """Log once per process, not per layer."""
    logger.info("quantized linear layers of %s", what)


def plain(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply in float32. Inputs are rounded if the checkpoint expects that."""
    rows = x.float()
    if weight.activations is not None:
        group_size = None if weight.scale.shape[1] == 1 else weight.group_size
        rows = QuantizedRows(*quantize_rows(x, weight.activations, group_size), len(x), x.dtype).dequantize()
    out = F.linear(rows, weight.dequantize(torch.float32))
    return (out if bias is None else out + bias.float()).to(x.dtype)

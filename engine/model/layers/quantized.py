"""Layers with quantized weights: what they load, and the fastest product with it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.ops import quantized_linear
from engine.model.quantization.format import StoredWeight
from engine.model.quantization.online import Online

__all__ = ["StoredWeight", "head_product", "product"]


def product(
    stored: StoredWeight, order: Tensor | slice, dtype: torch.dtype
) -> tuple[quantized_linear.Multiply | None, Tensor | None]:
    """Return the fast product with the decoded weight; if there is none, the dequantized weight [outputs, inputs].

    order: see Product in linear.py.
    """
    weight = stored.decode()
    if isinstance(order, Tensor):
        weight = weight.rows(order)
    kernel = quantized_linear.select(weight, dtype)
    return kernel, weight.dequantize(dtype) if kernel is None else None


def head_product(weight: Tensor, format: Online, dtype: torch.dtype) -> quantized_linear.Multiply | None:
    """Return the fast product with the weight of a head [rows, hidden], rounded to a format; None if there is none."""
    return quantized_linear.select(format.quantize(weight), dtype)

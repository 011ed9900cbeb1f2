"""The product of a linear layer.

linear(x, weight, bias) -> [tokens, outputs]
    x: [tokens, inputs]; weight: [outputs, inputs], or what `pack` made of it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import numba_found
from engine.model.ops.dispatch import CPU_DTYPES

BLOCK_INPUTS = 1024  # that oneDNN sums at a time, except for a row that is alone, which it sums in one go


@cache
def cpu_kernels() -> Any:
    """The module of our kernel, or None where it cannot run."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512") or not numba_found():
        return None
    from engine.model.ops.cpu import linear as cpu

    return cpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A row has the same bits with any others, on a CPU with a packed weight; oneDNN computes one that is alone
    twice for that."""
    if is_ours(weight):
        return cpu_kernels().multiply(x, weight, bias)
    if x.device.type == "cpu" and len(x) == 1 and x.shape[1] > BLOCK_INPUTS:
        return multiply(torch.cat((x, x)), weight, bias)[:1]
    return multiply(x, weight, bias)


def linear_parts(x: Tensor, weights: Sequence[Tensor], parts: int) -> Sequence[Tensor]:
    """Return the products of that many parts of the inputs. weights: what `pack_parts` made of them."""
    if len(weights) < parts:
        return cpu_kernels().multiply(x, weights[0], None, parts).chunk(parts, dim=1)
    return [linear(part, weight) for part, weight in zip(x.chunk(parts, dim=1), weights, strict=True)]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU of the product, arXiv:1606.08415, with the error function; oneDNN makes one pass over it."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], "none")
    return F.gelu(linear(x, weight, bias))


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a weight, which `pack` may have rearranged for our own kernel: [len(ids), inputs]."""
    if is_ours(weight):
        return cpu_kernels().packed_rows(weight, ids)
    return F.embedding(ids, weight)


def pack_parts(weight: Tensor, parts: int) -> list[Tensor]:
    """Cut a weight [outputs, inputs] along its inputs, and pack the parts: into one tensor for our own kernel."""
    cut = weight.chunk(parts, dim=1)
    if weight.device.type == "cpu" and (cpu := cpu_kernels()) is not None and cpu.supports(cut[0]):
        return [cpu.pack(torch.cat(cut))]
    return [pack(part.contiguous()) for part in cut]


def is_ours(weight: Tensor) -> bool:
    return weight.dim() == 4


def is_packed(weight: Tensor) -> bool:
    return weight.is_mkldnn or is_ours(weight)


def pack(weight: Tensor) -> Tensor:
    """Rearrange the weight as our own kernel reads it or else oneDNN, so that it is not rearranged in every call.
    Return it unchanged where neither supports it."""
    if weight.device.type != "cpu" or weight.dtype not in CPU_DTYPES:
        return weight
    if weight.dtype == torch.bfloat16 and (cpu := cpu_kernels()) is not None and cpu.supports(weight):
        return cpu.pack(weight)
    if not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)

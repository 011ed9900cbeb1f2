"""The product of a linear layer.

linear(x, weight, bias) -> [tokens, outputs]
    x: [tokens, inputs]; weight: [outputs, inputs], or the result of `pack`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.devices.device import numba_found
from engine.model.ops import dispatch
from engine.model.ops.dispatch import CPU_DTYPES

BLOCK_INPUTS = 1024  # oneDNN sums this many inputs at a time in float32, but a single row in one go
PLAIN_OUTPUTS = 4096  # logits that are computed at a time without a kernel
BLOCK_ROWS = 16  # rows that oneDNN multiplies at a time in bfloat16: its order of sums depends on their number


@cache
def cpu_kernels() -> Any:
    """Return the module of our CPU kernel; None if the kernel cannot run here."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512") or not numba_found():
        return None
    return dispatch.kernels("cpu.linear")


def outputs_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """Return the number that must divide the number of outputs for our CPU kernel; 1 if the kernel is not used."""
    kernels = cpu_kernels() if device.type == "cpu" and dtype == torch.bfloat16 else None
    return 1 if kernels is None else int(kernels.COLUMN)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply. On a CPU with a packed weight, a row has the same bits in any batch. To ensure this for oneDNN, its
    rows are computed `in_blocks`."""
    if is_ours(weight):
        return cpu_kernels().multiply(x, weight, bias)
    return in_blocks(x, lambda rows: multiply(rows, weight, bias))


def logits(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """Multiply by a weight from `pack_head`, in float32: [tokens, inputs] -> [tokens, outputs]. Rounded to bfloat16,
    logits would have steps of 1/8, and near ties would be lost. outputs: those of the weight before it was packed."""
    if is_ours(weight):
        return cpu_kernels().multiply(x, weight, None, wide=True)[:, :outputs]
    if x.dtype == torch.float32:
        return linear(x, weight)
    if x.device.type == "cpu":
        return logits_plain(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def logits_plain(x: Tensor, weight: Tensor) -> Tensor:
    """The same in PyTorch, some outputs at a time, since the whole weight in float32 would take too much memory."""
    return torch.cat([_wide_product(x, part.float()) for part in weight.split(PLAIN_OUTPUTS)], dim=1)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    return in_blocks(x, lambda rows: F.linear(rows.float(), weight))


def in_blocks(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply x [tokens, inputs] so that oneDNN sums each row in the same order: in bfloat16 always BLOCK_ROWS rows at
    a time, and in float32 a single row as two equal rows."""
    tokens = len(x)
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        blocks = F.pad(x, (0, 0, 0, -tokens % BLOCK_ROWS)).split(BLOCK_ROWS)
        return torch.cat([product(block) for block in blocks])[:tokens]
    if x.device.type == "cpu" and tokens == 1 and x.shape[1] > BLOCK_INPUTS:
        return product(torch.cat((x, x)))[:1]
    return product(x)


def linear_parts(x: Tensor, weights: Sequence[Tensor], parts: int) -> Sequence[Tensor]:
    """Return one product for each of `parts` equal parts of the inputs. weights: from `pack_parts`."""
    if len(weights) < parts:
        return cpu_kernels().multiply(x, weights[0], None, parts).chunk(parts, dim=1)
    return [linear(part, weight) for part, weight in zip(x.chunk(parts, dim=1), weights, strict=True)]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return GELU (with the error function, arXiv:1606.08415) of the product; oneDNN computes both in one pass."""
    if weight.is_mkldnn:
        gelu = torch.ops.mkldnn._linear_pointwise
        return in_blocks(x, lambda rows: gelu(rows, weight, bias, "gelu", [], "none"))
    return F.gelu(linear(x, weight, bias))


def linear_heads(x: Tensor, weights: Tensor, room: int) -> Tensor:
    """Multiply each head by its own weight, with our own kernel: [tokens, heads, inputs] -> [tokens, heads, outputs +
    room]; the last `room` values of a head are uninitialised. weights: packed, those of all heads stacked."""
    cpu = cpu_kernels()
    return cpu.multiply_heads(x, weights, len(weights) * cpu.COLUMN // x.shape[1] + room)


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a weight, [len(ids), inputs], even if `pack` has rearranged it for our own kernel."""
    if is_ours(weight):
        return cpu_kernels().packed_rows(weight, ids)
    return F.embedding(ids, weight)


def pack_parts(weight: Tensor, parts: int) -> list[Tensor]:
    """Cut a weight [outputs, inputs] along its inputs and pack the parts; our own kernels take all of them in one
    tensor."""
    if dispatch.gpu_kernels(weight.dtype, weight.device):
        return [weight]
    cut = weight.chunk(parts, dim=1)
    if weight.device.type == "cpu" and (cpu := cpu_kernels()) is not None and cpu.supports(cut[0]):
        return [cpu.pack(torch.cat(cut))]
    return [pack(part.contiguous()) for part in cut]


def pack_outputs(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pack a weight with few outputs, and pad it and its bias with zeros as our own kernel needs it. This kernel gives
    a row the same bits in any batch in float32 too."""
    cpu = cpu_kernels() if weight.device.type == "cpu" and weight.dtype in CPU_DTYPES else None
    missing = 0 if cpu is None else -len(weight) % cpu.COLUMN
    padded = F.pad(weight, (0, 0, 0, missing))
    if cpu is None or not cpu.supports(padded):
        return pack(weight), bias
    return cpu.pack(padded), None if bias is None else F.pad(bias.to(weight.dtype), (0, missing))


def is_ours(weight: Tensor) -> bool:
    return weight.dim() == 4


def is_packed(weight: Tensor) -> bool:
    return weight.is_mkldnn or is_ours(weight)


def pack_head(weight: Tensor) -> Tensor:
    """Rearrange the weight of `logits`, with zeros up to a whole column of our kernel. oneDNN would round what it
    returns."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return pack(weight)
    cpu = cpu_kernels()
    padded = weight if cpu is None else F.pad(weight, (0, 0, 0, -len(weight) % cpu.COLUMN))
    if cpu is None or not cpu.supports(padded):
        return weight
    cpu.MULTIPLY_WIDE.compile(weight.dtype)
    return cpu.pack(padded)


def pack(weight: Tensor) -> Tensor:
    """Rearrange a weight once, for our own kernel or else for oneDNN, so that no call has to. Return it unchanged if
    neither supports it."""
    if weight.device.type != "cpu" or weight.dtype not in CPU_DTYPES:
        return weight
    if weight.dtype == torch.bfloat16 and (cpu := cpu_kernels()) is not None and cpu.supports(weight):
        return cpu.pack(weight)
    if not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)

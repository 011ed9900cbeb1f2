"""Sums a fixed number of parts in a fixed order, however many ranks hold them: `determinism: strict`.

Ordinarily, a product whose inputs are split over the ranks is one sum per rank, each rounded, then added in rank order.
So another number of ranks gives other bits. Here the product is always PARTS sums, and each rank computes PARTS / ranks
of them. The sums are added as a binary tree. With one, two, four or eight ranks, each rank holds a whole subtree. So
the result is the same for each of these numbers of ranks.

On a CPU a row has the same bits in any batch anyway. A GPU's libraries choose by the number of rows how they sum a row,
so there this mode is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear
from engine.model.ops import linear
from engine.model.ops.tree_sum import tree_sum, tree_sum_plain
from engine.model.shard import ShardPlan
from engine.options.kernels import KernelOptions

PARTS = 8
OUTPUTS_MULTIPLE = 64
"""Outputs that our CPU kernel (ops/cpu/linear.py) computes at a time. A weight whose outputs are no multiple of it is
multiplied by another kernel, which sums in another order."""
LEAST_OUTPUTS = 2
"""Fewest outputs of a layer in float32: the products of a single output are summed in another order."""


def check(config: KernelOptions, model_config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError for options that could make bits depend on the batch or on the number of ranks."""
    if device.type != "cpu":
        why = "because libraries choose by the number of rows how they sum a row"
        raise ConfigError("determinism", "strict", f"left out on a GPU, {why}")
    for name, value, known in (
        ("torch_compile", True, not config.torch_compile),
        ("model", model_config.architecture, is_known(model_config)),
        ("quantization", config.quantization or "that of the model", model_config.quantization is None),
    ):
        if not known:
            raise ConfigError(
                name, value, "another value, or determinism left out, because `strict` does not support this value yet"
            )


def is_known(model: ModelConfig) -> bool:
    return not model.transformers and model.encoder is None


def pad_layers(model: nn.Module) -> None:
    """Pad each column-parallel layer, so that the same kernel multiplies it however many outputs a rank has."""
    if linear.cpu_kernels() is None:
        return
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear) and layer.device.type == "cpu":
            layer.outputs_multiple = OUTPUTS_MULTIPLE if layer.dtype == torch.bfloat16 else LEAST_OUTPUTS


def in_fixed_order(plan: ShardPlan) -> ShardPlan:
    """Return the plan with sums over PARTS parts in a fixed order. Raises ConfigError if the number of ranks does not
    divide PARTS."""
    if PARTS % plan.size:
        raise ConfigError("tensor_parallel_size", plan.size, f"1, 2, 4 or {PARTS} with determinism: strict")
    ranks, parts = RanksInOrder(plan.ranks), PARTS // plan.size
    return replace(plan, ranks=ranks, fixed_order=True, parts=parts, vocab_multiple=OUTPUTS_MULTIPLE)


class RanksInOrder(TPGroup):
    """Ranks whose sums run over all their parts in a fixed order."""

    def __init__(self, tp: TPGroup):
        super().__init__(tp.rank, tp.size)
        self._tp = tp

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return tree_sum(parts)
        dtype = parts[0].dtype
        own = tree_sum(parts, torch.float32)
        ranks = self._tp.all_gather(own).unflatten(-1, (self.size, -1)).unbind(-2)
        return tree_sum_plain(ranks).to(dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum rows of the embedding. A row is zero on all ranks except one, so the order does not matter."""
        return self._tp.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._tp.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum rows of experts. A row is zero on all ranks except one, so the order does not matter."""
        return self._tp.reduce_scatter(x)

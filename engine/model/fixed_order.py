"""Sums a fixed number of parts in a fixed order, however many ranks hold them: `determinism: strict`.

Ordinarily, a product whose inputs are split over the ranks is one sum per rank, each rounded, then added in rank order.
So another number of ranks gives other bits. Here the product is always PARTS sums, and each rank computes PARTS / ranks
of them. The sums are added as a binary tree. With one, two, four or eight ranks, each rank holds a whole subtree. So
the result is the same for each of these numbers of ranks.

On a CPU a row has the same bits in any batch anyway. On a GPU, `use_gpu_kernels` gives layers the kernels of
ops/gpu/strict.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.layers.attention import Attention
from engine.model.layers.embedding import LMHead
from engine.model.layers.linear import ColumnParallelLinear, Linear
from engine.model.ops import dispatch, linear, tree_sum

PARTS = 8
OUTPUTS_MULTIPLE = 64
"""Outputs that our CPU kernel (ops/cpu/linear.py) computes at a time. A weight whose outputs are no multiple of it is
multiplied by another kernel, which sums in another order."""
LEAST_OUTPUTS = 2
"""Fewest outputs of a layer in float32: the products of a single output are summed in another order."""


VOCAB_MULTIPLE = 4
"""torch's softmax on a GPU reads a row in pieces of this many float32, from the first address that is a multiple of a
piece. If the size of the vocabulary is not a multiple, the order of the sums depends on the row's index."""

MAX_HEAD_DIM = 128
"""Largest size of a head for which our strict attention fits into the registers of a GPU."""


def check(config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for options that could make bits depend on the batch or on the number of ranks."""
    on_cpu = device.type == "cpu"
    for name, value, known in (
        ("device", device.type, on_cpu or dispatch.gpu_kernels(dtype, device)),
        ("dtype", str(dtype).removeprefix("torch."), on_cpu or dtype == torch.bfloat16),
        ("kv_cache_dtype", config.kv_cache_dtype, on_cpu or config.kv_cache_dtype == "auto"),
        ("enable_lora", True, on_cpu or not config.enable_lora),
        ("torch_compile", True, not config.torch_compile),
        ("model", model_config.architecture, is_known(model_config)),
        ("quantization", config.quantization or "that of the model", model_config.quantization is None),
    ):
        if not known:
            raise ConfigError(
                name, value, "another value, or determinism left out, because `strict` does not support this value yet"
            )
    if not on_cpu and (parts := unknown_on_gpu(model_config)):
        limit = f"left out: on a GPU it does not support {', '.join(parts)} of {model_config.architecture} yet"
        raise ConfigError("determinism", "strict", limit)


def is_known(model: ModelConfig) -> bool:
    return not model.transformers and model.encoder is None


def unknown_on_gpu(model: ModelConfig) -> list[str]:
    """Return which parts of a model have no kernel in ops/gpu/strict."""
    parts = {
        "experts": model.moe,
        "recurrent layers": model.recurrent,
        "latent attention": model.latent,
        "images": model.vision,
        "layers of Gemma 3n and Gemma 4": model.gemma,
        "bidirectional attention": model.bidirectional,
        f"heads of more than {MAX_HEAD_DIM}": model.head_dim > MAX_HEAD_DIM,
        "pooling": model.head != "lm",
        f"a vocab_size that is no multiple of {VOCAB_MULTIPLE}": model.vocab_size % VOCAB_MULTIPLE,
    }
    return [name for name, present in parts.items() if present]


def use_gpu_kernels(model: nn.Module) -> None:
    """Give packed layers the kernels in which a row has the same bits in any batch. Row-parallel layers already use
    such kernels in `linear_parts`. All other kernels compute each row, head or token separately in every mode."""
    from engine.model.ops.gpu.strict import attention
    from engine.model.ops.gpu.strict.linear import Product

    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.ops = attention
        elif isinstance(layer, (Linear, LMHead)) and layer.weight is not None:
            layer.kernel = Product(layer.weight, torch.float32 if isinstance(layer, LMHead) else layer.weight.dtype)


def pad_layers(model: nn.Module) -> None:
    """Pad each column-parallel layer, so that the same kernel multiplies it however many outputs a rank has."""
    if linear.cpu_kernels() is None:
        return
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear) and layer.device.type == "cpu":
            layer.outputs_multiple = OUTPUTS_MULTIPLE if layer.dtype == torch.bfloat16 else LEAST_OUTPUTS


class FixedOrder(TPGroup):
    """A group whose sums run over PARTS parts in a fixed order."""

    fixed_order = True

    def __init__(self, tp: TPGroup):
        """Raises ConfigError if the number of ranks does not divide PARTS."""
        if PARTS % tp.size:
            raise ConfigError("tensor_parallel_size", tp.size, f"1, 2, 4 or {PARTS} with determinism: strict")
        super().__init__(tp.rank, tp.size)
        self.parts, self.vocab_multiple = PARTS // tp.size, OUTPUTS_MULTIPLE
        self.expert_exchange = tp.expert_exchange
        self._tp = tp

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return tree_sum.tree_sum(parts)
        dtype = parts[0].dtype
        own = tree_sum.tree_sum(parts, torch.float32)
        ranks = self._tp.all_gather(own).unflatten(-1, (self.size, -1)).unbind(-2)
        return tree_sum.tree_sum_plain(ranks).to(dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum rows of the embedding. A row is zero on all ranks except one, so the order does not matter."""
        return self._tp.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._tp.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum rows of experts. A row is zero on all ranks except one, so the order does not matter."""
        return self._tp.reduce_scatter(x)

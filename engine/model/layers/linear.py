"""Linear layers that are split over the ranks. A column-parallel layer, elementwise work and a row-parallel layer
together need one all-reduce: Megatron-LM, arXiv:1909.08053, section 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.ops import linear
from engine.model.shard import INPUTS, OUTPUTS, Shard, Sharded, ShardPlan, Shards, replicated

Order = Tensor | slice
AS_STORED = slice(None)


class Addend(Protocol):
    """What is added to a layer's product."""

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """Add to `outs`, the products of parts of the inputs x [tokens, inputs]: each is [tokens, outputs or more]."""


class UnpackedWeight(Protocol):
    """The weights of a layer in the checkpoint's format."""

    shards: Shards

    @property
    def numel(self) -> int: ...


class Product(Sharded):
    """A layer with a product to which others can be added.

    weights: this rank's shards by name in the checkpoint, stacked along the outputs.
    order: index that puts this rank's outputs of a shard into the layer's order, if it differs from the checkpoint's.
    """

    takes_addend = True  #: whether the layer adds `addend` to all of its products
    weights: dict[str, Shard]
    order: Order = AS_STORED
    addend: Addend | None = None


class Linear(Product):
    """A product with this rank's shards of `weights`, stacked along the outputs.

    format: format in which the checkpoint stores the weights (quantized.py); None for ordinary weights. Weights in a
    format stay in `stored` until `pack` converts them to the fastest form: a `kernel`, or an ordinary `weight`.
    """

    def __init__(self, weights: dict[str, Shard], format: object | None):
        super().__init__()
        self.weights = weights
        self.weight: nn.Parameter | None = None
        self.stored: UnpackedWeight | None = None
        self.kernel: Callable[[Tensor, Tensor | None], Tensor] | None = None
        if format is not None:
            self.stored = stored = quantized().StoredWeight(weights, format)
            self.quantized_parameters = stored.numel
        else:
            inputs = next(iter(weights.values())).local_shape[INPUTS]
            self.weight = nn.Parameter(torch.empty(self.outputs, inputs), requires_grad=False)

    @property
    def outputs(self) -> int:
        return sum(weight.local_shape[OUTPUTS] for weight in self.weights.values())

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product without a sum over ranks: [tokens, inputs] -> [tokens, outputs]."""
        if self.kernel is not None:
            out = self.kernel(x, bias)
        else:
            assert self.weight is not None, "weights were loaded, but not packed"
            out = linear.linear(x, self.weight, bias)
        if self.addend is not None:
            self.addend.add([out], x)
        return out

    def pack(self) -> None:
        if self.stored is not None:
            self.kernel, weight = quantized().product(self.stored, self.order, self.dtype)
            self.stored = None
            if weight is not None:
                self.weight = nn.Parameter(weight, requires_grad=False)
        if self.weight is not None:
            self.weight = packed(self.weight)

    def shards(self) -> Shards:
        if self.stored is not None:
            return dict(self.stored.shards)
        assert self.weight is not None, "nothing can be loaded after packing"
        targets = self.weight.data.split([weight.local_shape[OUTPUTS] for weight in self.weights.values()])
        named = zip(self.weights.items(), targets, strict=True)
        return {f"{name}.weight".removeprefix("."): (weight, target) for (name, weight), target in named}


class ColumnParallelLinear(Linear):
    """Linear layers with the same input, merged into one; each rank computes a slice of every layer's outputs.

    outputs: this rank's slice of each layer's outputs, by the layer's name in the checkpoint.
    [tokens, inputs] -> [tokens, all these slices side by side]
    """

    outputs_multiple = 1  #: `pack` pads an ordinary weight with zeros to a multiple of it

    def __init__(self, inputs: int, outputs: dict[str, Shard], bias: bool = False, format: object | None = None):
        self.biases = outputs
        weights = {name: Shard((*s.shape, inputs), OUTPUTS, s.start, s.size) for name, s in outputs.items()}
        super().__init__(weights, format)
        self.bias = nn.Parameter(torch.empty(self.outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.bias)
        return out if out.shape[1] == self.outputs else out[:, : self.outputs].contiguous()

    def pack(self) -> None:
        if self.weight is not None and (missing := -self.outputs % self.outputs_multiple):
            self.weight = nn.Parameter(F.pad(self.weight, (0, 0, 0, missing)), requires_grad=False)
            if self.bias is not None:
                self.bias = nn.Parameter(F.pad(self.bias, (0, missing)), requires_grad=False)
        super().pack()

    def shards(self) -> Shards:
        shards = super().shards()
        if self.bias is not None:
            targets = self.bias.data.split([bias.size for bias in self.biases.values()])
            for (name, bias), target in zip(self.biases.items(), targets, strict=True):
                shards[f"{name}.bias".removeprefix(".")] = bias, target
        return shards


class PaddedLinear(ColumnParallelLinear):
    """A column-parallel layer whose outputs are padded, in case our CPU kernel does not support their number. Returns
    the outputs without padding, as a view in which each token's values are contiguous."""

    def __init__(self, inputs: int, outputs: dict[str, Shard], bias: bool = False, format: object | None = None):
        super().__init__(inputs, outputs, bias, format)
        self.outputs_multiple = linear.outputs_multiple(self.dtype, self.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)[:, : self.outputs]


class ReplicatedLinear(ColumnParallelLinear):
    """Linear layers with the same input, merged into one. Every rank computes all of it: [tokens, inputs] ->
    [tokens, all outputs].

    outputs: number of outputs of the only layer, or of each layer by its name in the checkpoint.
    """

    def __init__(self, inputs: int, outputs: int | dict[str, int], bias: bool = True):
        sizes = outputs if isinstance(outputs, dict) else {"": outputs}
        super().__init__(inputs, {name: Shard((size,), 0, 0, size) for name, size in sizes.items()}, bias)


class QKVLinear(ColumnParallelLinear):
    """Query, key and value projections of this rank's heads: [tokens, hidden] -> q [tokens, heads, head_dim], k and v
    [tokens, kv_heads, head_dim]. With more ranks than KV heads, neighbouring ranks hold the same KV head.

    prefix: the layer's name in the checkpoint (`layers.0.self_attn`). parts: the projections that the layer has.
    """

    query_parts: ClassVar[int] = 1  #: 2 if each query head is followed by its gate, as one more head

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str = "", parts: str = "qkv"):
        self.head_dim = cfg.head_dim
        self.kv_heads = cfg.kv_heads_per_rank(tp.size)
        self.heads = cfg.num_heads // tp.size
        first_kv_head = tp.rank * cfg.num_kv_heads // tp.size
        q = Shard.of_rank((self.query_parts * cfg.num_heads * cfg.head_dim,), 0, tp, "query size")
        kv_size, start = cfg.num_kv_heads * cfg.head_dim, first_kv_head * cfg.head_dim
        kv = Shard((kv_size,), 0, start, self.kv_heads * cfg.head_dim)
        outputs = {part: q if part == "q" else kv for part in parts}
        format = cfg.weight_format(prefix, *(f"{part}_proj" for part in parts))
        super().__init__(cfg.hidden_size, outputs, cfg.qkv_bias, format)
        self.split = self.query_parts * self.heads, *[self.kv_heads] * (len(parts) - 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=1)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over the ranks: [tokens, inputs / ranks] -> [tokens, outputs], summed over
    ranks.

    pieces: weights of the parts into which this rank's inputs are cut, if their products are summed in a fixed order.
    """

    def __init__(self, inputs: int, outputs: int, tp: ShardPlan, bias: bool = False, format: object | None = None):
        super().__init__({"": Shard.of_rank((outputs, inputs), INPUTS, tp, "input size")}, format)
        self.tp = tp
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.pieces: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None and self.tp.size == 1 and not self.pieces:
            return self.multiply(x, self.bias)
        out = self.tp.ranks.sum(self.partials(x))
        return out if self.bias is None else out + self.bias  # after the sum: once, not once per rank

    def partials(self, x: Tensor) -> Sequence[Tensor]:
        """Return this rank's summands of the result, without the bias. The result is the sum of all ranks' summands."""
        if not self.pieces:
            return [self.multiply(x)]
        parts = linear.linear_parts(x, self.pieces, self.tp.parts)
        if self.addend is not None:
            self.addend.add(parts, x)
        return parts

    def pack(self) -> None:
        if self.tp.fixed_order:
            assert self.weight is not None, "strict determinism is refused for quantized weights"
            self.pieces = linear.pack_parts(self.weight, self.tp.parts)
            self.weight = None
        super().pack()

    def shards(self) -> Shards:
        return super().shards() | ({} if self.bias is None else {"bias": replicated(self.bias)})


def packed(weight: nn.Parameter, pack: Callable[[Tensor], Tensor] = linear.pack) -> nn.Parameter:
    return nn.Parameter(pack(weight.data), requires_grad=False)


def quantized() -> ModuleType:
    """Import what weights in a format need."""
    return import_module(".quantized", __package__)

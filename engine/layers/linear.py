"""Linear layers split over the ranks. A column-parallel layer, some elementwise work and a row-parallel layer need one
all-reduce together: Megatron-LM, arXiv:1909.08053, section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.layers.shard import Shard, Sharded, divide, replicated
from engine.model_config import ModelConfig
from engine.ops import linear
from engine.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs [start, start + size) of a linear layer with `total` outputs."""

    total: int
    start: int
    size: int

    @classmethod
    def of_rank(cls, total: int, tp: TPGroup, what: str) -> Part:
        size = divide(total, tp.size, what)
        return cls(total, tp.rank * size, size)


class ColumnParallelLinear(Sharded):
    """Linear layers with the same input, merged into one; each rank computes a part of every layer's outputs.

    [tokens, inputs] -> [tokens, sum of the parts' sizes], in the order of `parts` (name in the checkpoint -> part).
    """

    def __init__(self, inputs: int, parts: dict[str, Part], bias: bool = False):
        super().__init__()
        self.parts = parts
        outputs = sum(part.size for part in parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        self.weight = packed(self.weight)

    def shards(self) -> dict[str, Shard]:
        shards = {}
        row = 0
        for name, part in self.parts.items():
            rows = slice(row, row + part.size)
            shards[f"{name}.weight"] = Shard(
                self.weight.data[rows], (part.total, self.weight.shape[1]), start=part.start
            )
            if self.bias is not None:
                shards[f"{name}.bias"] = Shard(self.bias.data[rows], (part.total,), start=part.start)
            row += part.size
        return shards


class QKVLinear(ColumnParallelLinear):
    """Query, key and value projections: [tokens, hidden] -> q [tokens, heads, head_dim], k and v [tokens, kv_heads,
    head_dim], of this rank's heads.

    With more ranks than KV heads, neighbouring ranks hold the same KV head.
    """

    def __init__(self, cfg: ModelConfig, tp: TPGroup):
        self.head_dim = cfg.head_dim
        self.kv_heads = cfg.kv_heads_per_rank(tp.size)
        self.heads = cfg.num_heads // tp.size
        first_kv_head = tp.rank * cfg.num_kv_heads // tp.size
        q = Part.of_rank(cfg.num_heads * cfg.head_dim, tp, "query size")
        kv = Part(cfg.num_kv_heads * cfg.head_dim, first_kv_head * cfg.head_dim, self.kv_heads * cfg.head_dim)
        super().__init__(cfg.hidden_size, {"q": q, "k": kv, "v": kv}, cfg.qkv_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        heads = super().forward(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v


class RowParallelLinear(Sharded):
    """[tokens, inputs / ranks] -> [tokens, outputs], the sum of what every rank contributes."""

    def __init__(self, inputs: int, outputs: int, tp: TPGroup, bias: bool = False):
        super().__init__()
        self.tp = tp
        self.inputs = inputs
        self.weight = nn.Parameter(torch.empty(outputs, divide(inputs, tp.size, "input size")), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.tp.all_reduce(linear.linear(x, self.weight))
        return out if self.bias is None else out + self.bias  # after the sum: once, not once per rank

    def pack(self) -> None:
        self.weight = packed(self.weight)

    def shards(self) -> dict[str, Shard]:
        outputs, size = self.weight.shape
        shards = {"weight": Shard(self.weight.data, (outputs, self.inputs), dim=1, start=self.tp.rank * size)}
        if self.bias is not None:
            shards["bias"] = replicated(self.bias)
        return shards


def packed(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(linear.pack(weight.data), requires_grad=False)

"""Linear layers split over the ranks. A column-parallel layer, some elementwise work and a row-parallel layer need one
all-reduce together: Megatron-LM, arXiv:1909.08053, section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.ops import linear, quantized_linear
from engine.model.quantization.format import INPUTS, OUTPUTS, Piece, StoredWeight, WeightFormat
from engine.model.shard import Shard, Sharded, divide, replicated


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


class Linear(Sharded):
    """The product with weights of the checkpoint, `pieces` of them one below the other (name -> this rank's piece).

    format: how the checkpoint stores them; None: as they are. Quantized weights lie in `stored` until `pack` turns them
    into what multiplies them fastest: a `kernel`, or an ordinary `weight`.
    """

    def __init__(self, pieces: dict[str, Piece], format: WeightFormat | None):
        super().__init__()
        self.pieces = pieces
        self.dtype = torch.get_default_dtype()
        self.weight: nn.Parameter | None = None
        self.stored: StoredWeight | None = None
        self.kernel: quantized_linear.Multiply | None = None
        if format is not None:
            self.stored = StoredWeight(pieces, format)
            self.quantized_parameters = self.stored.numel
        else:
            shapes = [piece.shape for piece in pieces.values()]
            self.weight = nn.Parameter(torch.empty(sum(s[0] for s in shapes), shapes[0][1]), requires_grad=False)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[tokens, inputs of the pieces] -> [tokens, outputs of the pieces]"""
        if self.kernel is not None:
            return self.kernel(x, bias)
        assert self.weight is not None, "weights were loaded, but not packed"
        return linear.linear(x, self.weight, bias)

    def pack(self) -> None:
        if self.stored is not None:
            weight = self.stored.decode()
            self.stored = None
            self.kernel = quantized_linear.choose(weight, self.dtype)
            if self.kernel is None:
                self.weight = nn.Parameter(weight.dequantize(self.dtype), requires_grad=False)
        if self.weight is not None:
            self.weight = packed(self.weight)

    def shards(self) -> dict[str, Shard]:
        if self.stored is not None:
            return dict(self.stored.shards)
        assert self.weight is not None, "nothing can be loaded after packing"
        rows = self.weight.data.split([piece.shape[0] for piece in self.pieces.values()])
        named = zip(self.pieces.items(), rows, strict=True)
        return {f"{name}.weight".removeprefix("."): piece.shard(target) for (name, piece), target in named}


class ColumnParallelLinear(Linear):
    """Linear layers with the same input, merged into one; each rank computes a part of every layer's outputs.

    [tokens, inputs] -> [tokens, sum of the parts' sizes], in the order of `parts` (name in the checkpoint -> part).
    """

    def __init__(self, inputs: int, parts: dict[str, Part], bias: bool = False, format: WeightFormat | None = None):
        self.parts = parts
        pieces = {name: Piece(part.total, inputs, OUTPUTS, part.start, part.size) for name, part in parts.items()}
        super().__init__(pieces, format)
        outputs = sum(part.size for part in parts.values())
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def shards(self) -> dict[str, Shard]:
        shards = super().shards()
        if self.bias is not None:
            biases = self.bias.data.split([part.size for part in self.parts.values()])
            for (name, part), target in zip(self.parts.items(), biases, strict=True):
                shards[f"{name}.bias"] = Shard(target, (part.total,), start=part.start)
        return shards


class QKVLinear(ColumnParallelLinear):
    """Query, key and value projections: [tokens, hidden] -> q [tokens, heads, head_dim], k and v [tokens, kv_heads,
    head_dim], of this rank's heads.

    With more ranks than KV heads, neighbouring ranks hold the same KV head. where: of the layer in the checkpoint
    (`layers.0.self_attn`).
    """

    def __init__(self, cfg: ModelConfig, tp: TPGroup, where: str = ""):
        self.head_dim = cfg.head_dim
        self.kv_heads = cfg.kv_heads_per_rank(tp.size)
        self.heads = cfg.num_heads // tp.size
        first_kv_head = tp.rank * cfg.num_kv_heads // tp.size
        q = Part.of_rank(cfg.num_heads * cfg.head_dim, tp, "query size")
        kv = Part(cfg.num_kv_heads * cfg.head_dim, first_kv_head * cfg.head_dim, self.kv_heads * cfg.head_dim)
        format = cfg.weight_format(where, "q_proj", "k_proj", "v_proj")
        super().__init__(cfg.hidden_size, {"q": q, "k": kv, "v": kv}, cfg.qkv_bias, format)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        heads = super().forward(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v


class RowParallelLinear(Linear):
    """[tokens, inputs / ranks] -> [tokens, outputs], the sum of what every rank contributes."""

    def __init__(self, inputs: int, outputs: int, tp: TPGroup, bias: bool = False, format: WeightFormat | None = None):
        size = divide(inputs, tp.size, "input size")
        super().__init__({"": Piece(outputs, inputs, INPUTS, tp.rank * size, size)}, format)
        self.tp = tp
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.tp.all_reduce(self.multiply(x))
        return out if self.bias is None else out + self.bias  # after the sum: once, not once per rank

    def shards(self) -> dict[str, Shard]:
        return super().shards() | ({} if self.bias is None else {"bias": replicated(self.bias)})


def packed(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(linear.pack(weight.data), requires_grad=False)

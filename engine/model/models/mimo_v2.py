"""MiMo V2 Flash: values smaller than keys, windows with sinks and more KV heads in most layers, and DeepSeek V3's
routing of experts. Layers for multi-token prediction are not loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.kv_groups import KVCacheSpec
from engine.model.layers.attention import Attention
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.models.llama import LlamaForCausalLM
from engine.model.models.moe import MoELayer
from engine.model.shard import Shard, Sharded, ShardPlan, Shards


class MiMoQKVLinear(ColumnParallelLinear):
    """Like QKVLinear, with values of another size: [tokens, hidden] -> q [tokens, heads, head_dim], k
    [tokens, kv_heads, head_dim], v [tokens, kv_heads, value_dim]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str):
        self.heads, self.head_dim = cfg.num_heads // tp.size, cfg.head_dim
        heads = cfg.kv_heads_per_rank(tp.size)
        first = tp.rank * cfg.num_kv_heads // tp.size

        def of_kv(size: int) -> Shard:
            return Shard((cfg.num_kv_heads * size,), 0, first * size, heads * size)

        self.head_dims = {"q": cfg.head_dim, "k": cfg.head_dim, "v": cfg.values.dim}
        q = Shard.of_rank((cfg.num_heads * cfg.head_dim,), 0, tp, "query size")
        outputs = {"q": q, "k": of_kv(cfg.head_dim), "v": of_kv(cfg.values.dim)}
        format = cfg.weight_format(prefix, *(f"{part}_proj" for part in outputs))
        super().__init__(cfg.hidden_size, outputs, cfg.qkv_bias, format)
        self.split = [shard.size for shard in outputs.values()]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        parts = super().forward(x).split(self.split, dim=1)
        return tuple(part.unflatten(1, (-1, dim)) for part, dim in zip(parts, self.head_dims.values(), strict=True))


class MiMoAttention(Sharded):
    """Attention whose values are scaled, and made as large as keys by zeros, which the output does not have. Layers
    with a window have sinks.

    cfg: with the layer's number of KV heads.
    """

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        prefix = f"layers.{layer}.self_attn"
        self.value_dim, self.value_scale = cfg.values.dim, cfg.values.scale
        self.head_dim = cfg.head_dim
        self.qkv_proj = MiMoQKVLinear(cfg, tp, prefix)
        self.attend = Attention(cfg, layer, self.dtype, self.device)
        self.o_proj = RowParallelLinear(
            cfg.num_heads * self.value_dim, cfg.hidden_size, tp, cfg.output_bias, cfg.weight_format(prefix, "o_proj")
        )
        self.shard = Shard.of_rank((cfg.num_heads,), 0, tp, "heads")
        self.sinks = None
        if cfg.window[layer] is not None:
            self.sinks = nn.Parameter(torch.empty(self.shard.size), requires_grad=False)
            self.attend.sinks = self.sinks.data

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        padded = F.pad(v * self.value_scale, (0, self.head_dim - self.value_dim))
        attended = self.attend(q, k, padded, batch).unflatten(1, (-1, self.head_dim))
        return self.o_proj(attended[..., : self.value_dim].flatten(1))

    def shards(self) -> Shards:
        return {} if self.sinks is None else {"sinks": (self.shard, self.sinks.data)}


class MiMoLayer(MoELayer):
    attention_type = MiMoAttention

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        spec = cfg.layer_kv[layer]
        assert isinstance(spec, KVCacheSpec)
        super().__init__(replace(cfg, num_kv_heads=spec.num_kv_heads), tp, layer)


class MiMoV2ForCausalLM(LlamaForCausalLM):
    unused = ("model.mtp.",)
    layer_type: ClassVar[type[nn.Module]] = MiMoLayer

    def canonical_name(self, name: str) -> str | None:
        return super().canonical_name(name.replace(".attention_sink_bias", ".sinks"))  # as its authors name it

"""Multi-head latent attention: DeepSeek V2, arXiv:2405.04434, section 2.1.

The cache holds one vector per token for all heads. The vector consists of the latent from which keys and values are
made, and the rotated part of the key. The projections from latents to keys and values are absorbed into queries and
outputs, for prompts as in decode, so that a token has the same bits in both. This makes the products of a prompt
larger, since scores and sums run over latents instead of a head's keys and values: 576 + 512 multiplications per pair
of tokens and head instead of 192 + 128 (DeepSeek V3). In exchange, cached latents are never expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.grouped_addend import GroupedAddend
from engine.model.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from engine.model.layers.norm import RMSNorm
from engine.model.layers.recurrent.gated_delta_net import head_shard
from engine.model.layers.rope import rope_table
from engine.model.ops import linear
from engine.model.ops.latent import attention
from engine.model.ops.rope import rotate_plain
from engine.model.quantization.format import StoredWeight, WeightFormat
from engine.model.shard import OUTPUTS, Shard, ShardPlan

NORM_EPS = 1e-6  # for the norms of latents


class LatentAttention(nn.Module):
    """Latent attention over this rank's heads: [tokens, hidden] -> [tokens, hidden]. All ranks hold the whole cache."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        latent, prefix = cfg.latent, f"layers.{layer}.self_attn"
        assert latent is not None
        if cfg.num_heads % tp.size:
            raise ConfigError("tensor_parallel_size", tp.size, f"a divisor of the model's {cfg.num_heads} heads")
        self.cfg, self.scale, self.heads = latent, cfg.attention_scale, cfg.num_heads // tp.size
        self.group, self.layer = cfg.kv_place(layer)
        queries = head_shard(cfg.num_heads, latent.nope_dim + latent.rope_dim, tp)
        self.q_proj = self.q_a_proj = None
        if latent.q_rank is None:
            self.q_proj = projection(cfg, cfg.hidden_size, queries, f"{prefix}.q_proj")
        else:
            whole = Shard((latent.q_rank,), 0, 0, latent.q_rank)
            self.q_a_proj = projection(cfg, cfg.hidden_size, whole, f"{prefix}.q_a_proj", cfg.qkv_bias)
            self.q_a_layernorm = RMSNorm(latent.q_rank, NORM_EPS)
            self.q_b_proj = projection(cfg, latent.q_rank, queries, f"{prefix}.q_b_proj")
        size = latent.rank + latent.rope_dim
        self.kv_a_proj_with_mqa = projection(
            cfg, cfg.hidden_size, Shard((size,), 0, 0, size), f"{prefix}.kv_a_proj_with_mqa", cfg.qkv_bias
        )
        self.kv_a_layernorm = RMSNorm(latent.rank, NORM_EPS)
        rows = head_shard(cfg.num_heads, latent.nope_dim + latent.value_dim, tp)
        weight = Shard((*rows.shape, latent.rank), OUTPUTS, rows.start, rows.size)
        self.kv_b_proj = HeadProjections(weight, self.heads, latent.nope_dim, cfg.weight_format(prefix, "kv_b_proj"))
        self.o_proj = RowParallelLinear(
            cfg.num_heads * latent.value_dim, cfg.hidden_size, tp, cfg.output_bias, cfg.weight_format(prefix, "o_proj")
        )
        dtype, device = self.kv_b_proj.dtype, self.kv_b_proj.device
        self.table = rope_table(cfg.rope[layer], latent.rope_dim, cfg.max_position_embeddings, dtype, device)
        self.write, self.attend = attention.select(dtype, device)
        self.rotate_and_write = attention.select_rotate_and_write(dtype, device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        latent = self.cfg
        latents = self.query_latents(x)
        q = self.queries(latents).unflatten(-1, (self.heads, -1))
        c, k = self.kv_a_proj_with_mqa(x).split((latent.rank, latent.rope_dim), dim=-1)
        out = self.attended(q, c, k, x, latents, batch.of_group(self.group))
        return self.o_proj(self.kv_b_proj.from_latent(out).flatten(1))

    def attended(self, q: Tensor, c: Tensor, k: Tensor, x: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        """Norm this step's latents c [tokens, rank], write them and the keys k [tokens, rope_dim] to the cache, and
        attend with q [tokens, heads, nope_dim + rope_dim]. Returns [tokens, heads, rank]. x: input of the layer.
        latents: result of `query_latents`."""
        if self.rotate_and_write is not None and self.kv_b_proj.stacked:
            nope, rotated = q.split((self.cfg.nope_dim, self.cfg.rope_dim), dim=-1)
            q = self.kv_b_proj.to_latent(nope, self.cfg.rope_dim)
            norm = self.kv_a_layernorm.weight, self.kv_a_layernorm.eps
            self.rotate_and_write(q, rotated, c, k, norm, self.table, self.cfg.interleaved, batch, self.layer)
        else:
            q, vectors = self.rotated(q, c, k, batch)
            self.write(vectors, batch, self.layer)
        return self.attend(q, batch, self.layer, self.scale, self.cfg.rank)

    def rotated(self, q: Tensor, c: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return q projected to latents [tokens, heads, rank + rope_dim] and this step's vectors [tokens, rank +
        rope_dim], both rotated. c: latents before their norm."""
        c = self.kv_a_layernorm(c)
        nope, rotated = q.split((self.cfg.nope_dim, self.cfg.rope_dim), dim=-1)
        q = torch.cat((self.kv_b_proj.to_latent(nope), self.rotate(rotated, batch)), dim=-1)
        return q, torch.cat((c, self.rotate(k[:, None], batch)[:, 0]), dim=-1)

    def query_latents(self, x: Tensor) -> Tensor:
        """Return the vectors from which queries are projected: [tokens, hidden] -> [tokens, q_rank]. In some models
        this is x itself."""
        return x if self.q_a_proj is None else self.q_a_layernorm(self.q_a_proj(x))

    def queries(self, latents: Tensor) -> Tensor:
        """Return the queries of this rank's heads: [tokens, heads * (nope_dim + rope_dim)]."""
        return self.q_b_proj(latents) if self.q_proj is None else self.q_proj(latents)

    def rotate(self, x: Tensor, batch: Batch) -> Tensor:
        return rotate(x, self.table, batch, self.cfg.interleaved)


def rotate(x: Tensor, table: Tensor, batch: Batch, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, rope_dim] by positions. If `interleaved`, the two values of a pair are neighbours; they
    are first moved half a head apart, in queries and keys alike."""
    if interleaved:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return rotate_plain(x, table, batch.positions)


class HeadProjections(Linear):
    """Each head's projections from latents to keys and to values: `kv_b_proj`, [heads * (nope_dim + value_dim), rank].

    `pack` dequantizes the weight and splits it, so that each head gets to_keys [rank, nope_dim] and to_values
    [value_dim, rank]. What is added to the weight is split likewise.
    """

    takes_addend = False
    stored: StoredWeight | None
    key_addend: GroupedAddend | None = None
    value_addend: GroupedAddend | None = None

    def __init__(self, weight: Shard, heads: int, nope_dim: int, format: WeightFormat | None):
        super().__init__({"": weight}, format)
        self.heads, self.nope_dim = heads, nope_dim
        self.to_keys: Tensor | list[Tensor] = []
        self.to_values: Tensor | list[Tensor] = []

    @property
    def stacked(self) -> bool:
        """Whether one kernel multiplies all heads by their weights, which are one tensor."""
        return all(isinstance(weights, Tensor) for weights in (self.to_keys, self.to_values))

    @property
    def heads_take_addends(self) -> bool:
        """Whether `key_addend` and `value_addend` can be added to the products of the heads."""
        return self.device.type in ("cpu", "meta")

    def pack(self) -> None:
        if self.stored is not None:
            weight = self.stored.decode().dequantize(self.dtype)
        else:
            assert self.weight is not None
            weight = self.weight.data
        weight = weight.unflatten(0, (self.heads, -1))
        self.to_keys = packed_heads(weight[:, : self.nope_dim].mT)
        self.to_values = packed_heads(weight[:, self.nope_dim :])
        self.weight = self.stored = None

    def to_latent(self, q: Tensor, room: int = 0) -> Tensor:
        """Project queries to latents: [tokens, heads, nope_dim] -> [tokens, heads, rank + room]. The last `room` values
        of a head are uninitialised; only `stacked` weights leave any."""
        latents = of_heads(q, self.to_keys, room)
        if self.key_addend is not None:
            self.key_addend.add_each(latents, q)
        return latents

    def from_latent(self, out: Tensor) -> Tensor:
        """Project latents to values: [tokens, heads, rank] -> [tokens, heads, value_dim]."""
        values = of_heads(out, self.to_values)
        if self.value_addend is not None:
            self.value_addend.add_each(values, out)
        return values


def packed_heads(weights: Tensor) -> Tensor | list[Tensor]:
    """Return weights [heads, outputs, inputs] in the form that `of_heads` takes."""
    if weights.device.type != "cpu":
        return weights.contiguous()
    packed = [linear.pack(head.contiguous()) for head in weights]
    return torch.cat(packed) if linear.is_ours(packed[0]) else packed


def of_heads(x: Tensor, weights: Tensor | list[Tensor], room: int = 0) -> Tensor:
    """Multiply each head [tokens, heads, inputs] by its weight. On a CPU, this uses the kernel of linear layers, so a
    row has the same bits in any batch. room: see `to_latent`."""
    if isinstance(weights, Tensor) and linear.is_ours(weights):
        return linear.linear_heads(x, weights, room)
    heads = x.transpose(0, 1)
    if isinstance(weights, Tensor):
        outputs = weights.shape[1]
        out = x.new_empty(*x.shape[:2], outputs + room)
        torch.bmm(heads, weights.mT, out=out[..., :outputs].transpose(0, 1))
        return out
    products = [linear.linear(head.contiguous(), weight) for head, weight in zip(heads, weights, strict=True)]
    return torch.stack(products, dim=1)


def projection(cfg: ModelConfig, inputs: int, outputs: Shard, name: str, bias: bool = False) -> ColumnParallelLinear:
    return ColumnParallelLinear(inputs, {"": outputs}, bias, cfg.weight_format(*name.rsplit(".", 1)))

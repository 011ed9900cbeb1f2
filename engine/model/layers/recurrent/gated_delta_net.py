"""Gated DeltaNet, arXiv:2412.06464, section 3.4, as in Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, PaddedLinear, RowParallelLinear
from engine.model.layers.recurrent.causal_conv import CausalConv
from engine.model.layers.recurrent.gated_norm import GatedRMSNorm
from engine.model.ops.recurrent import gates, linear_attention
from engine.model.quantization.format import WeightFormat
from engine.model.shard import Shard, Sharded, ShardPlan, Shards

NORM_EPS = 1e-6  # for the L2 norm of queries and keys


class GatedDeltaNet(Sharded):
    """Gated DeltaNet over this rank's heads: [tokens, hidden] -> [tokens, hidden].

    Queries, keys and values pass a convolution. For each token, a value head decays its state, moves the value that the
    state returns for the key towards the token's value, and reads the state with the query. The checkpoint holds the
    input projections as `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        assert cfg.recurrent is not None
        self.index, self.cfg, r = cfg.recurrent.layers.index(layer), cfg.recurrent, cfg.recurrent
        self.heads, self.key_heads = r.heads_per_rank(tp.size)
        prefix = f"layers.{layer}.linear_attn"
        key, self.value = head_shard(r.key_heads, r.key_dim, tp), head_shard(r.heads, r.value_dim, tp)
        self.sections, self.gates = {"q": key, "k": key, "v": self.value}, head_shard(r.heads, 1, tp)
        self.make_projections(cfg, tp, prefix)
        self.conv1d = CausalConv(self.sections, r.kernel, r.conv_bias)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.decay_and_share = gates.select(self.dtype, self.device)
        self.linear_attention = linear_attention.select(r.key_dim, r.value_dim, r.decay_dim, self.device)
        self.norm = GatedRMSNorm(r.value_dim, cfg.rms_norm_eps)
        format = cfg.weight_format(prefix, "out_proj")
        self.out_proj = RowParallelLinear(r.heads * r.value_dim, cfg.hidden_size, tp, format=format)

    def make_projections(self, cfg: ModelConfig, tp: ShardPlan, prefix: str) -> None:
        outputs = {f"qkv_{name}": section for name, section in self.sections.items()} | {"z": self.value}
        format = cfg.weight_format(prefix, "in_proj_qkv", "in_proj_z")
        self.in_proj: ColumnParallelLinear = ColumnParallelLinear(cfg.hidden_size, outputs, format=format)
        self.gate_proj = PaddedLinear(cfg.hidden_size, {"b": self.gates, "a": self.gates})

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project x [tokens, hidden]. Returns q, k and v side by side [tokens, channels], the output gate z
        [tokens, heads, value_dim], and b and a [tokens, heads], from which update strengths and decays are computed."""
        channels = self.conv1d.weight.shape[0]
        projected, gates = self.in_proj(x), self.gate_proj(x)
        b, a = gates.chunk(2, dim=-1)
        return projected[:, :channels], projected[:, channels:].unflatten(-1, (self.heads, -1)), b, a

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.states is not None
        states, r = batch.states.layers[self.index], self.cfg
        qkv, z, b, a = self.project(x)
        qkv = self.conv1d(qkv, states, batch)
        size = self.key_heads * r.key_dim
        q, k, v = qkv.split((size, size, self.heads * r.value_dim), dim=-1)
        q, k = (part.unflatten(-1, (self.key_heads, -1)) for part in (q, k))
        v = v.unflatten(-1, (self.heads, -1))
        decay, share = self.decay_and_share(a, b, self.A_log, self.dt_bias)
        o = self.linear_attention(q, k, v, decay, share, states, batch, r.key_dim**-0.5, NORM_EPS)
        return self.out_proj(self.norm(o, z).flatten(1))

    def shards(self) -> Shards:
        return {"A_log": (self.gates, self.A_log.data), "dt_bias": (self.gates, self.dt_bias.data)}


class GroupedLinear(PaddedLinear):
    """A padded layer whose outputs are grouped in the checkpoint: each group has some outputs of every part. Returns
    the same part of all groups side by side. The rows of the weight are put into this order once, when it is packed.

    widths: outputs of each part of a group. groups: number of groups on this rank.
    """

    order: Tensor

    def __init__(
        self, inputs: int, outputs: dict[str, Shard], widths: Sequence[int], groups: int,
        format: WeightFormat | None = None,
    ):  # fmt: skip
        super().__init__(inputs, outputs, format=format)
        rows = torch.arange(groups * sum(widths), device="cpu").view(groups, -1)
        self.order = torch.cat([part.flatten() for part in rows.split(tuple(widths), dim=1)])

    def pack(self) -> None:
        if self.weight is not None:
            self.weight = nn.Parameter(self.weight[self.order.to(self.weight.device)], requires_grad=False)
        super().pack()


class GroupedGatedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet of a checkpoint with `in_proj_qkvz` and `in_proj_ba`. Their outputs are grouped by key head: each
    group has a query, a key, and the values and gates of the value heads that use them."""

    def make_projections(self, cfg: ModelConfig, tp: ShardPlan, prefix: str) -> None:
        r = self.cfg
        if r.key_heads % tp.size:
            raise ConfigError("tensor_parallel_size", tp.size, f"a divisor of the {r.key_heads} key heads")
        share = r.heads // r.key_heads
        widths = r.key_dim, r.key_dim, share * r.value_dim, share * r.value_dim
        qkvz, ba = (
            {name: head_shard(r.key_heads, size, tp)} for name, size in (("qkvz", sum(widths)), ("ba", 2 * share))
        )
        format = cfg.weight_format(prefix, "in_proj_qkvz")
        self.in_proj = GroupedLinear(cfg.hidden_size, qkvz, widths, self.key_heads, format)
        self.gate_proj = GroupedLinear(cfg.hidden_size, ba, (share, share), self.key_heads)


def head_shard(heads: int, size: int, tp: ShardPlan) -> Shard:
    """Return this rank's slice of `heads` heads of `size` values. With more ranks than heads, ranks share them."""
    count, first = max(1, heads // tp.size), tp.rank * heads // tp.size
    return Shard((heads * size,), 0, first * size, count * size)

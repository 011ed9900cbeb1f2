"""Kimi Delta Attention, arXiv:2510.26692, section 3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, PaddedLinear, ReplicatedLinear, RowParallelLinear
from engine.model.layers.recurrent.causal_conv import CausalConv
from engine.model.layers.recurrent.gated_delta_net import NORM_EPS, head_shard
from engine.model.layers.recurrent.gated_norm import GatedRMSNorm
from engine.model.ops.recurrent import gates, linear_attention
from engine.model.shard import Shard, Sharded, ShardPlan, Shards

# Our names -> names in the checkpoint.
KIMI_DELTA_ATTENTION = {
    "conv1d.q": "q_conv1d", "conv1d.k": "k_conv1d", "conv1d.v": "v_conv1d", "latents.f": "f_a_proj",
    "latents.g": "g_a_proj",
}  # fmt: skip


class SigmoidGatedRMSNorm(GatedRMSNorm):
    by_sigmoid = True


class KimiDeltaAttention(Sharded):
    """Kimi Delta Attention over this rank's heads: [tokens, hidden] -> [tokens, hidden]. It is Gated DeltaNet with one
    decay per channel of a key instead of one per head. Decays and the output's gate are projected from small latents.
    """

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        assert cfg.recurrent is not None
        self.index, r, prefix = cfg.recurrent.layers.index(layer), cfg.recurrent, f"layers.{layer}.self_attn"
        (self.heads, _), self.size = r.heads_per_rank(tp.size), r.key_dim
        self.of_heads, self.channels = head_shard(r.heads, 1, tp), head_shard(r.heads, self.size, tp)
        sections, format = dict.fromkeys("qkv", self.channels), cfg.weight_format(prefix, "q_proj", "k_proj", "v_proj")
        self.qkv_proj = ColumnParallelLinear(cfg.hidden_size, sections, format=format)
        self.conv1d = CausalConv(sections, r.kernel, r.conv_bias, apart=True)
        self.latents = ReplicatedLinear(cfg.hidden_size, {"f": self.size, "g": self.size}, bias=False)
        self.f_b_proj = ColumnParallelLinear(self.size, {"": self.channels})
        self.g_b_proj = ColumnParallelLinear(self.size, {"": self.channels})
        self.b_proj = PaddedLinear(cfg.hidden_size, {"": self.of_heads})
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.size, dtype=torch.float32), requires_grad=False)
        self.decay_and_share = gates.select(self.dtype, self.device)
        self.linear_attention = linear_attention.select(r.key_dim, r.value_dim, r.decay_dim, self.device)
        self.o_norm = SigmoidGatedRMSNorm(r.value_dim, cfg.rms_norm_eps)
        format = cfg.weight_format(prefix, "o_proj")
        self.o_proj = RowParallelLinear(r.heads * r.value_dim, cfg.hidden_size, tp, format=format)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.states is not None
        states = batch.states.layers[self.index]
        q, k, v = self.conv1d(self.qkv_proj(x), states, batch).unflatten(-1, (3, self.heads, self.size)).unbind(1)
        f, g = self.latents(x).chunk(2, dim=-1)
        decay, share = self.decay_and_share(self.f_b_proj(f), self.b_proj(x), self.A_log, self.dt_bias)
        o = self.linear_attention(q, k, v, decay, share, states, batch, self.size**-0.5, NORM_EPS)
        gate = self.g_b_proj(g).unflatten(-1, (self.heads, -1))
        return self.o_proj(self.o_norm(o, gate).flatten(1))

    def shards(self) -> Shards:
        shard = self.of_heads
        whole = Shard((1, 1, *shard.shape, 1), 2, shard.start, shard.size)
        return {
            "A_log": (whole, self.A_log.data[None, None, :, None]),
            "dt_bias": (self.channels, self.dt_bias.data),
        }

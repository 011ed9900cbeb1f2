"""Mamba-2, arXiv:2405.21060, section 7, as in Bamba, Falcon-H1, Granite 4 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import PaddedLinear, RowParallelLinear
from engine.model.layers.recurrent.causal_conv import CausalConv
from engine.model.layers.recurrent.gated_delta_net import head_shard
from engine.model.ops.elementwise.norms import GroupNorm
from engine.model.ops.recurrent import linear_attention
from engine.model.ops.recurrent import mamba2 as ops
from engine.model.shard import Shard, Sharded, ShardPlan, Shards

# Outputs of `in_proj`, in the checkpoint's order.
MAMBA2 = {f"in_proj.{name}": "in_proj" for name in ("z", "x", "B", "C", "dt")}


class Mamba2(Sharded):
    """Mamba-2 over this rank's heads: [tokens, hidden] -> [tokens, hidden].

    Computed as linear attention without the delta rule: queries C, keys B, values x * dt and decays A * dt.

    multipliers: factors on the five outputs of `in_proj`.
    """

    def __init__(
        self, cfg: ModelConfig, tp: ShardPlan, layer: int, prefix: str = "mamba", multipliers: Sequence[float] = ()
    ):
        super().__init__()
        assert cfg.recurrent is not None
        self.index, self.cfg, r = cfg.recurrent.layers.index(layer), cfg.recurrent, cfg.recurrent
        self.heads, self.groups = r.heads_per_rank(tp.size)
        prefix = f"layers.{layer}.{prefix}"
        inner, group = head_shard(r.heads, r.value_dim, tp), head_shard(r.key_heads, r.key_dim, tp)
        self.of_heads = head_shard(r.heads, 1, tp)
        outputs = {"z": inner, "x": inner, "B": group, "C": group, "dt": self.of_heads}
        self.in_proj = PaddedLinear(cfg.hidden_size, outputs, r.proj_bias, cfg.weight_format(prefix, "in_proj"))
        self.multipliers: Tensor | None = None
        if any(multiplier != 1.0 for multiplier in multipliers):
            sizes = torch.tensor([shard.size for shard in outputs.values()])
            self.multipliers = torch.tensor(multipliers, dtype=self.dtype).repeat_interleave(sizes)
        self.conv1d = CausalConv({"x": inner, "B": group, "C": group}, r.kernel, r.conv_bias)
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.steps, self.gated = ops.select(self.dtype, self.device)
        self.linear_attention = linear_attention.select(r.key_dim, r.value_dim, r.decay_dim, self.device)
        self.norm = Mamba2Norm(cfg, tp, inner) if r.gated_norm else None
        if self.norm is not None and not self.norm.whole:
            self.gated = ops.gated_plain
        format = cfg.weight_format(prefix, "out_proj")
        self.out_proj = RowParallelLinear(r.heads * r.value_dim, cfg.hidden_size, tp, r.out_bias, format)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.states is not None
        states, r = batch.states.layers[self.index], self.cfg
        projected = self.in_proj(x)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        inner = self.heads * r.value_dim
        z, xbc, dt = projected.split((inner, self.conv1d.weight.shape[0], self.heads), dim=-1)
        xbc = self.conv1d(xbc, states, batch)
        x, keys, queries = xbc.split((inner, self.groups * r.key_dim, self.groups * r.key_dim), dim=-1)
        keys, queries = (part.unflatten(-1, (self.groups, -1)) for part in (keys, queries))
        decay, values = self.steps(x, dt, self.A_log, self.dt_bias, r.time_step_limit)
        y = self.linear_attention(queries, keys, values, decay, None, states, batch, 1.0, None)
        return self.out_proj(self.gated(y, x, z, self.D, None if self.norm is None else self.norm.of_groups()))

    def shards(self) -> Shards:
        return {name: (self.of_heads, getattr(self, name).data) for name in ("A_log", "D", "dt_bias")}


class Mamba2Norm(Sharded):
    """RMSNorm of each group of this rank's values, before or after gating. A group that is split over ranks is normed
    as a whole."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, inner: Shard):
        super().__init__()
        assert cfg.recurrent is not None
        self.tp, self.inner, self.eps, self.gate_last = tp, inner, cfg.rms_norm_eps, cfg.recurrent.norm_before_gate
        self.groups, self.size = cfg.recurrent.key_heads, inner.shape[0] // cfg.recurrent.key_heads
        self.parts = max(1, self.groups // tp.size, tp.parts)  # parts of this rank's values, each summed separately
        if self.parts * tp.size % self.groups:
            raise ConfigError("determinism", "strict", f"left out: its parts do not divide {self.groups} groups")
        self.weight = nn.Parameter(torch.empty(inner.size), requires_grad=False)

    @property
    def whole(self) -> bool:
        """Whether each group lies on one rank, so that its squares are summed up at once."""
        return self.parts * self.tp.size == self.groups

    def of_groups(self) -> GroupNorm:
        groups = max(1, self.groups // self.tp.size)
        return GroupNorm(self.weight, self.eps, groups, self.gate_last, self.factors)

    def factors(self, x: Tensor) -> Tensor:
        """Return the factor that normalises each group's values: [tokens, this rank's groups]. Squares are summed part
        by part."""
        squares = x.square().unflatten(-1, (self.parts, -1)).sum(-1)
        if self.groups < self.tp.size:
            squares = self.tp.ranks.all_gather(squares).unflatten(-1, (self.groups, -1)).sum(-1)
            squares = squares[:, self.tp.rank * self.groups // self.tp.size, None]
        elif self.parts > self.groups // self.tp.size:
            squares = squares.unflatten(-1, (self.groups // self.tp.size, -1)).sum(-1)
        return torch.rsqrt(squares / self.size + self.eps)

    def shards(self) -> Shards:
        return {"weight": (self.inner, self.weight.data)}

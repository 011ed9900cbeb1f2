"""A gated short convolution, as in LFM2, arXiv:2511.23404."""

from __future__ import annotations

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.layers.recurrent.causal_conv import CausalConv
from engine.model.ops.elementwise import gates
from engine.model.shard import Shard, ShardPlan

# Outputs of `in_proj`, in the checkpoint's order.
SHORT_CONV = {f"in_proj.{name}": "in_proj" for name in ("B", "C", "x")}


class ShortConv(nn.Module):
    """C * conv(B * x), where B, C and x are projections of each token: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        assert cfg.recurrent is not None
        self.index, r = cfg.recurrent.layers.index(layer), cfg.recurrent
        prefix, channels = f"layers.{layer}.conv", Shard.of_rank((r.channels,), 0, tp, "hidden_size")
        outputs, format = dict.fromkeys(("B", "C", "x"), channels), cfg.weight_format(prefix, "in_proj")
        self.in_proj = ColumnParallelLinear(cfg.hidden_size, outputs, r.proj_bias, format)
        self.conv = CausalConv({"x": channels}, r.kernel, r.conv_bias, silu=False)
        self.multiply = gates.select_multiply(self.in_proj.dtype, self.in_proj.device)
        format = cfg.weight_format(prefix, "out_proj")
        self.out_proj = RowParallelLinear(r.channels, cfg.hidden_size, tp, r.out_bias, format)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.states is not None
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        convolved = self.conv(self.multiply(b, x), batch.states.layers[self.index], batch)
        return self.out_proj(self.multiply(c, convolved))

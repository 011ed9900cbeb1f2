"""Gated MLP, arXiv:2002.05202."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.ops import activation
from engine.model.shard import Shard, ShardPlan


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [tokens, hidden] -> [tokens, hidden].

    prefix: the layer's name in the checkpoint (`layers.0.mlp`). size: None for the model's `intermediate_size`.
    """

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str = "", size: int | None = None):
        super().__init__()
        size = size or cfg.intermediate_size
        outputs = Shard.of_rank((size,), 0, tp, "intermediate_size")
        format = cfg.weight_format(prefix, "gate_proj", "up_proj")
        self.gate_up_proj = ColumnParallelLinear(
            cfg.hidden_size, {"gate": outputs, "up": outputs}, cfg.mlp_bias, format
        )
        self.activation = activation.select(cfg.activation, self.gate_up_proj.dtype, self.gate_up_proj.device)
        self.down_proj = RowParallelLinear(
            size, cfg.hidden_size, tp, cfg.mlp_bias, cfg.weight_format(prefix, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def partials(self, x: Tensor) -> Sequence[Tensor]:
        """Return this rank's summands of the result, without the bias. The result is the sum of all ranks' summands."""
        return self.down_proj.partials(self.activation(self.gate_up_proj(x)))

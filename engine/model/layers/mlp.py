"""Gated MLP, arXiv:2002.05202."""

from __future__ import annotations

from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from engine.model.ops import activation


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [tokens, hidden] -> [tokens, hidden]. where: in the checkpoint (`layers.0.mlp`)."""

    def __init__(self, cfg: ModelConfig, tp: TPGroup, where: str = ""):
        super().__init__()
        part = Part.of_rank(cfg.intermediate_size, tp, "intermediate_size")
        self.gate_up_proj = ColumnParallelLinear(
            cfg.hidden_size, {"gate": part, "up": part}, cfg.mlp_bias, cfg.weight_format(where, "gate_proj", "up_proj")
        )
        self.activation = activation.choose(cfg.activation)
        self.down_proj = RowParallelLinear(
            cfg.intermediate_size, cfg.hidden_size, tp, cfg.mlp_bias, cfg.weight_format(where, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))

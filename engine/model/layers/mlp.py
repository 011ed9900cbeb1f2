"""Gated MLP, arXiv:2002.05202."""

from __future__ import annotations

from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.model.ops import activation, linear
from engine.model.quantization.format import WeightFormat
from engine.model.shard import Shard


class GatedLinear(ColumnParallelLinear):
    """act(gate(x)) * up(x), of this rank's slice of the outputs: [tokens, hidden] -> [tokens, size].

    fused: `kernel` does all of it.
    """

    def __init__(self, cfg: ModelConfig, outputs: Shard, format: WeightFormat | None):
        self.fused = False
        super().__init__(cfg.hidden_size, {"gate": outputs, "up": outputs}, cfg.mlp_bias, format)
        self.activation = activation.select(cfg.activation, self.dtype, self.device)
        self._name = cfg.activation

    @property
    def outputs(self) -> int:
        return super().outputs // 2 if self.fused else super().outputs

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.fused else self.activation(out)

    def pack(self) -> None:
        if self.weight is None or self._name != "silu" or (kernel := linear.select_silu_mul(self.weight)) is None:
            return super().pack()
        self.kernel, self.weight, self.fused = kernel, None, True
        if self.bias is not None:
            self.bias.data = kernel.interleaved(self.bias)
        return None


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [tokens, hidden] -> [tokens, hidden].

    prefix: the layer's name in the checkpoint (`layers.0.mlp`). size: None for the model's `intermediate_size`.
    """

    def __init__(self, cfg: ModelConfig, tp: TPGroup, prefix: str = "", size: int | None = None):
        super().__init__()
        size = size or cfg.intermediate_size
        outputs = Shard.of_rank((size,), 0, tp, "intermediate_size")
        format = cfg.weight_format(prefix, "gate_proj", "up_proj")
        self.gate_up_proj = GatedLinear(cfg, outputs, format)
        self.down_proj = RowParallelLinear(
            size, cfg.hidden_size, tp, cfg.mlp_bias, cfg.weight_format(prefix, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))

    def partials(self, x: Tensor) -> list[Tensor]:
        """Return this rank's parts of the result, which is the sum of all ranks' parts, without the bias."""
        return self.down_proj.partials(self.gate_up_proj(x))

"""Granite 4: Mamba-2 in most layers, attention without positions in the others, a shared expert with or without routed
ones, and factors on the inputs and outputs of blocks."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from engine.model.config import ModelConfig
from engine.model.layers.recurrent.mamba2 import MAMBA2, Mamba2
from engine.model.models.hybrid.layer import HybridLayer, ScaledForCausalLM, ScaledLayer
from engine.model.models.llama import PACKED
from engine.model.shard import ShardPlan

SHARED = {
    "shared_mlp.gate_up_proj.gate": "shared_mlp.input_linear",
    "shared_mlp.gate_up_proj.up": "shared_mlp.input_linear",
    "shared_mlp.down_proj": "shared_mlp.output_linear",
}


class Granite4Layer(ScaledLayer, HybridLayer):
    recurrent_type = Mamba2


class Granite4ForCausalLM(ScaledForCausalLM):
    packed: ClassVar[dict[str, str]] = (
        {"mlp.shared_expert": "shared_mlp", "recurrent": "mamba", "mlp.gate": "mlp.router.layer"}
        | SHARED
        | MAMBA2
        | PACKED
    )
    layer_type: ClassVar[type[nn.Module]] = Granite4Layer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        if cfg.moe is None:
            self.renamed = ".mlp.", ".shared_mlp."  # there is only the shared expert
        else:
            self.renamed = ".mlp.experts.", ".mlp."

    def checkpoint_name(self, path: str) -> str:
        """Return a tensor's name. Routed experts are in `block_sparse_moe.input_linear` and `output_linear`."""
        path = super().checkpoint_name(path.replace(*self.renamed))
        for own, original in (("mlp.gate_up_proj", "mlp.input_linear"), ("mlp.down_proj", "mlp.output_linear")):
            if path.endswith(own):
                path = path.replace(own, f"{original}.weight")
        return path

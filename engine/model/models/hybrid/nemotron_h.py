"""Nemotron-H and Nemotron 3, arXiv:2504.03624 and arXiv:2512.20848: each layer is one of Mamba-2, attention without
positions, an MLP, or experts. MLPs have no gate; their activation is ReLU squared."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from engine.model.layers.moe import BiasedRouter, Experts
from engine.model.layers.norm import RMSNorm
from engine.model.layers.recurrent.mamba2 import MAMBA2, Mamba2
from engine.model.models.llama import PACKED, LlamaAttention, LlamaForCausalLM
from engine.model.ops import moe as ops
from engine.model.ops.elementwise import activations
from engine.model.shard import Shard, ShardPlan


class MLP(nn.Module):
    """down(act(up(x))), without a gate: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str = "", size: int | None = None):
        super().__init__()
        size = size or cfg.intermediate_size
        outputs = Shard.of_rank((size,), 0, tp, "intermediate_size")
        format = cfg.weight_format(prefix, "up_proj")
        self.up_proj = ColumnParallelLinear(cfg.hidden_size, {"": outputs}, cfg.mlp_bias, format)
        self.activation = activations.select(cfg.activation, self.up_proj.dtype, self.up_proj.device)
        self.down_proj = RowParallelLinear(
            size, cfg.hidden_size, tp, cfg.mlp_bias, cfg.weight_format(prefix, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class NemotronHAttention(LlamaAttention):
    name = "mixer"


class NemotronHExperts(Experts):
    gated = False


class NemotronHMoE(nn.Module):
    """Experts with DeepSeek V3's routing: [tokens, hidden] -> [tokens, hidden]. In the larger models, routed experts
    work on a smaller latent. Shared projections lead to the latent and back."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str):
        super().__init__()
        moe = cfg.moe
        assert moe is not None
        self.tp, self.gate, size = tp, BiasedRouter(cfg.hidden_size, moe), moe.latent_size or cfg.hidden_size
        names = [f"experts.{i}.{name}" for i in range(moe.num_experts) for name in ("up_proj", "down_proj")]
        self.experts = NemotronHExperts(size, moe, cfg.activation, tp, cfg.weight_format(prefix, *names))
        self.shared_experts = MLP(cfg, tp, f"{prefix}.shared_experts", moe.shared_intermediate_size)
        self.add_shared = ops.select_add_shared(self.experts.dtype, self.experts.device)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent_size:
            self.fc1_latent_proj = ReplicatedLinear(cfg.hidden_size, size, cfg.mlp_bias)
            self.fc2_latent_proj = ReplicatedLinear(size, cfg.hidden_size, cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        routed, (experts, weights) = x, self.gate(x)
        if self.fc1_latent_proj is not None:
            routed = self.fc1_latent_proj(x)
        mixed = self.experts(routed, experts, weights)
        if self.fc2_latent_proj is not None:
            mixed = self.fc2_latent_proj(mixed)
        return self.add_shared(mixed, self.shared_experts(x), None)


class NemotronHLayer(nn.Module):
    """A pre-norm residual block with a single part: (x, residual), each [tokens, hidden] -> (x, residual)."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.kind, prefix = cfg.block_types[layer], f"layers.{layer}.mixer"
        self.mixes = self.kind not in ("moe", "mlp")
        if self.kind == "attention":
            self.mixer: nn.Module = NemotronHAttention(cfg, tp, layer)
        elif self.mixes:
            self.mixer = Mamba2(cfg, tp, layer, "mixer")
        else:
            self.mixer = (NemotronHMoE if self.kind == "moe" else MLP)(cfg, tp, prefix)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        residual, normed = self.norm.add(residual, x)
        return self.mixer(normed, batch) if self.mixes else self.mixer(normed), residual


class NemotronHForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | MAMBA2
    unused = ("mtp.",)
    embedding_name, final_norm_name = "embeddings", "norm_f"
    layer_type: ClassVar[type[nn.Module]] = NemotronHLayer

"""gpt-oss, arXiv:2508.10925: attention with a sink in every head; experts with biases and clamped gates, whose weights
are one tensor per layer, published in MXFP4."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.expert_split import split_experts
from engine.model.layers.moe import Experts, MixtureOfExperts
from engine.model.models.llama import PACKED, LlamaAttention, LlamaForCausalLM
from engine.model.models.moe import MoELayer
from engine.model.ops import dispatch, moe
from engine.model.ops.elementwise import activations
from engine.model.quantization.format import StoredWeight, WeightFormat
from engine.model.quantization.mxfp4 import MXFP4
from engine.model.shard import INPUTS, OUTPUTS, Shard, Sharded, ShardPlan, Shards

logger = logging.getLogger(__name__)


class GptOssAttention(LlamaAttention, Sharded):
    """Llama's attention with sinks: each head has a score that takes attention weight without contributing a value."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(cfg, tp, layer)
        self.shard = Shard.of_rank((cfg.num_heads,), 0, tp, "heads")
        self.sinks = nn.Parameter(torch.empty(self.shard.size), requires_grad=False)
        self.attend.sinks = self.sinks.data

    def shards(self) -> Shards:
        return {"sinks": (self.shard, self.sinks.data)}


class GptOssExperts(Experts):
    """This rank's experts, sliced or whole. Rows of gate and up alternate.

    gate_up: [experts, 2 * slice, hidden], down: [experts, hidden, slice]

    A checkpoint that is not quantized stores both transposed. Weights in MXFP4 are multiplied as stored if there is a
    kernel and the slice cuts no group of inputs; otherwise `pack` dequantizes them, one expert at a time. The bias of
    `down` must be added once only, so it is 0 on ranks above 0, unless they have whole experts.
    """

    orientation_is_known = True

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, format: WeightFormat | None):
        Sharded.__init__(self)
        assert cfg.moe is not None
        if format is not None and not isinstance(format, MXFP4):
            assert cfg.quantization is not None
            raise ConfigError("quantization", cfg.quantization.method, "mxfp4 or left out, for the experts of gpt-oss")
        num, hidden, size = cfg.moe.num_experts, cfg.hidden_size, cfg.moe.intermediate_size
        self.tp, self.num_experts, self.split = tp, num, split_experts(num, hidden, tp)
        self.row_size, self.k = hidden, cfg.moe.experts_per_token
        self.format = format
        part = Shard.of_rank((hidden, size), INPUTS, self.split.slices, "intermediate_size")
        self.weights = {
            "gate_up_proj": Shard((2 * size, hidden), OUTPUTS, 2 * part.start, 2 * part.size), "down_proj": part
        }  # fmt: skip
        self.activation = activations.select("swigluoai", self.dtype, self.device)
        self.op = moe.select(hidden, part.size, self.dtype, self.device, self.split.spread)
        self.allocate()

    def allocate(self) -> None:
        (outputs, hidden), part = self.weights["gate_up_proj"].shape, self.weights["down_proj"]
        num, own = self.num_experts, self.split.own
        self.rows = Shard((num, outputs, hidden), 1, 2 * part.start, 2 * part.size, own)
        self.columns = Shard((num, hidden, outputs // 2), 2, part.start, part.size, own)
        self.gate_up_bias = nn.Parameter(torch.empty(len(own), 2 * part.size), requires_grad=False)
        self.down_bias = nn.Parameter(torch.zeros(len(own), hidden), requires_grad=False)
        self.biases = self.gate_up_bias.data, self.down_bias.data
        self.gate_up = self.down = None
        self.packed: list[StoredWeight] = []
        if self.format is None:
            self.gate_up = nn.Parameter(torch.empty(self.rows.local_shape), requires_grad=False)
            self.down = nn.Parameter(torch.empty(self.columns.local_shape), requires_grad=False)
        else:
            weights = {"gate_up_proj": self.rows}, {"down_proj": self.columns}
            self.packed = [StoredWeight(weight, self.format) for weight in weights]
            self.quantized_parameters = sum(stored.numel for stored in self.packed)

    def shards(self) -> Shards:
        (num, outputs, hidden), own = self.rows.shape, self.split.own
        added = len(own) if self.split.slices.rank == 0 else 0
        gate_up = Shard((num, outputs), 1, self.rows.start, self.rows.size, own)
        shards: Shards = {
            "gate_up_proj_bias": (gate_up, self.gate_up_bias.data),
            "down_proj_bias": (Shard((num, hidden), 0, own.start, added), self.down_bias.data[:added]),
        }
        if self.gate_up is not None and self.down is not None:
            shards["gate_up_proj"] = self.rows.transposed(), self.gate_up.data.mT
            shards["down_proj"] = self.columns.transposed(), self.down.data.mT
        for stored in self.packed:
            shards |= {name.replace(".", "_"): shard for name, shard in stored.shards.items()}
        return shards

    def gate_up_pieces(self) -> list[Tensor]:
        assert self.gate_up is not None, "quantized weights cannot be cut"
        return list(self.gate_up.chunk(self.split.slices.parts, dim=1))

    def bias_pieces(self) -> list[moe.Biases]:
        """Return the biases of each part that `pieces` cuts. The bias of `down` is in the first part only, so it is
        added once."""
        parts = self.split.slices.parts
        down = [self.down_bias, *[torch.zeros_like(self.down_bias)] * (parts - 1)]
        gate_up = [bias.contiguous() for bias in self.gate_up_bias.chunk(parts, dim=1)]
        return list(zip(gate_up, down, strict=True))

    def pack(self) -> None:
        if self.tp.fixed_order:
            return super().pack()
        if self.packed and dispatch.gpu_kernels(self.dtype, self.device):
            logger.info("experts in mxfp4: multiplied as they are")
            self.keep(*(MXFP4.packed(w) or MXFP4.dequantize(w, self.dtype) for w in self.packed))
        elif self.packed:
            logger.info("experts in mxfp4: dequantized to %s at load", str(self.dtype).removeprefix("torch."))
            self.gate_up, self.down = (
                nn.Parameter(MXFP4.dequantize(w, self.dtype), requires_grad=False) for w in self.packed
            )
        self.packed = []
        if self.kept is None:
            self.pack_each()


class GptOssMoE(MixtureOfExperts):
    def make_experts(self, cfg: ModelConfig, prefix: str) -> Experts:
        return GptOssExperts(cfg, self.tp, cfg.weight_format(prefix, "experts"))


class GptOssLayer(MoELayer):
    attention_type = GptOssAttention
    moe_type = GptOssMoE


class GptOssForCausalLM(LlamaForCausalLM):
    packed: ClassVar[dict[str, str]] = PACKED | {"mlp.gate": "mlp.router"}
    layer_type = GptOssLayer

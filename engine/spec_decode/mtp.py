"""Multi-token prediction: a decoder layer that was trained with the target and follows the others in its checkpoint.

DeepSeek V3, arXiv:2412.19437, section 2.2, and GLM 4.5, arXiv:2508.06471.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.attention import Attention
from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.linear import ReplicatedLinear
from engine.model.layers.norm import RMSNorm
from engine.model.models.glm4_moe import Glm4MoeForCausalLM
from engine.model.models.registry import build
from engine.model.tensor_names import NativeNames
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.head_drafter import HeadDrafter
from engine.spec_decode.target import Target, Vocabulary


class SharedHead(nn.Module):
    """The norm before the output layer, which is the target's."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class MTPLayer(NativeNames, nn.Module):
    packed: ClassVar[dict[str, str]] = Glm4MoeForCausalLM.packed
    unused: tuple[str, ...] = ()

    def __init__(self, cfg: ModelConfig, layer_type: type[nn.Module], number: int):
        """cfg: of the target, with this layer, one of its own, among them. number: of the layer."""
        super().__init__()
        self.block = layer_type(cfg, TPGroup.single(), number)
        for module in self.block.modules():
            if isinstance(module, Attention | LatentAttention):
                module.group = module.layer = 0  # the only one of its cache
        self.prefix = f"model.layers.{number}."
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = ReplicatedLinear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.shared_head = SharedHead(cfg)
        self.vocabulary: list[Vocabulary] = []  # in a list, so that it is no module of this one

    def target_states(self, step: DraftInputs) -> Tensor:
        return step.hidden

    def forward(self, input_ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        pair = self.enorm(self.vocabulary[0].embed_tokens(input_ids)), self.hnorm(hidden)
        x, residual = self.block(self.eh_proj(torch.cat(pair, dim=-1)), None, batch)
        hidden, normed = self.shared_head.norm.add(residual, x)
        return normed, hidden

    def best(self, hidden: Tensor) -> Tensor:
        return self.vocabulary[0].best(hidden)[1]

    def checkpoint_name(self, path: str) -> str:
        return super().checkpoint_name(f".{path.removeprefix('block.')}").removeprefix("model..")

    def canonical_name(self, name: str) -> str | None:
        """Embedding and output layer, of which some checkpoints have copies in this layer, are the target's."""
        own = super().canonical_name(name) or ""
        if not own.startswith(self.prefix) or own.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            return None
        return own.removeprefix(self.prefix)


def mtp_drafter(target: Target) -> HeadDrafter:
    """Raise ConfigError if the target has no such layer."""
    cfg, number = target.config, target.config.num_layers
    if not isinstance(target.model, Glm4MoeForCausalLM) or cfg.recurrent or not cfg.num_nextn_predict_layers:
        limit = f"a method other than mtp for {cfg.architecture}, of which no layer predicts further tokens"
        raise ConfigError("speculative.method", "mtp", limit)
    assert cfg.moe is not None
    layer_type = target.model.layer_type
    cfg = replace(
        cfg,
        num_layers=number + 1,
        rope=(*cfg.rope, cfg.rope[-1]),
        window=(*cfg.window, cfg.window[-1]),
        moe=replace(cfg.moe, layers=cfg.moe.layers | {number}),
        max_position_embeddings=cfg.max_position_embeddings + target.block_size,
    )
    layer = build(lambda: MTPLayer(cfg, layer_type, number), target.dtype, target.device)
    target.load(layer, target.folder)
    layer.vocabulary.append(target.vocabulary())
    return HeadDrafter(layer, replace(cfg, num_layers=1), target)

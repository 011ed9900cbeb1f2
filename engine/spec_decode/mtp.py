"""Multi-token prediction: a decoder layer trained with the target, stored after the other layers in its checkpoint.

DeepSeek V3, arXiv:2412.19437, section 2.2, GLM 4.5, arXiv:2508.06471, and Qwen3-Next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.config_parts.stage import ALL_LAYERS
from engine.model.layers.attention import Attention
from engine.model.layers.latent_attention import LatentAttention
from engine.model.layers.linear import ReplicatedLinear
from engine.model.layers.norm import RMSNorm
from engine.model.models.gemma3 import GemmaRMSNorm
from engine.model.models.glm4_moe import Glm4MoeForCausalLM
from engine.model.models.hybrid.qwen3_next import Qwen3NextForCausalLM
from engine.model.models.registry import build
from engine.model.shard import ShardPlan
from engine.model.tensor_names import NativeNames
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.head_drafter import HeadDrafter
from engine.spec_decode.target import Target, Vocabulary


class SharedHead(nn.Module):
    """The norm before the output layer. The output layer itself is shared with the target."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm


class MTPLayer(NativeNames, nn.Module):
    packed: ClassVar[dict[str, str]] = Glm4MoeForCausalLM.packed
    unused: tuple[str, ...] = ()
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, cfg: ModelConfig, layer_type: type[nn.Module], number: int):
        """cfg: the target's configuration, including this layer. number: index of this layer."""
        super().__init__()
        self.block = layer_type(cfg, ShardPlan(), number)
        for module in self.block.modules():
            if isinstance(module, Attention | LatentAttention):
                module.group = module.layer = 0  # the only layer of the drafter's cache
        self.prefix = f"model.layers.{number}."
        self.enorm, self.hnorm, norm = (self.norm_type(cfg.hidden_size, cfg.rms_norm_eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.shared_head = SharedHead(norm)
        self.vocabulary: list[Vocabulary] = []  # in a list, so that it does not become a submodule

    def target_states(self, step: DraftInputs) -> Tensor:
        return step.hidden

    def forward(self, input_ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        pair = self.enorm(self.vocabulary[0].embed_tokens(input_ids)), self.hnorm(hidden)
        x, residual = self.block(self.eh_proj(torch.cat(pair, dim=-1)), None, batch)
        hidden, normed = self.shared_head.norm.add(residual, x)
        return normed, self.chained(hidden, normed)

    def chained(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """Return `hidden` or `normed`: the one that replaces the target's hidden states when drafting the next
        token."""
        return hidden

    def best(self, hidden: Tensor) -> Tensor:
        return self.vocabulary[0].best(hidden)[1]

    def checkpoint_name(self, path: str) -> str:
        return super().checkpoint_name(f".{path.removeprefix('block.')}").removeprefix("model..")

    def canonical_name(self, name: str) -> str | None:
        """Return our name of a tensor. Returns None for copies of the embedding and the output layer, since the
        target's are used."""
        own = super().canonical_name(name) or ""
        if not own.startswith(self.prefix) or own.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            return None
        return own.removeprefix(self.prefix)


class QwenMTPLayer(MTPLayer):
    """The layer of Qwen3-Next and Qwen 3.5: with attention, and with its tensors under `mtp.` in the checkpoint."""

    packed: ClassVar[dict[str, str]] = Qwen3NextForCausalLM.packed | {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm",
    }  # fmt: skip
    norm_type = GemmaRMSNorm

    def __init__(self, cfg: ModelConfig, layer_type: type[nn.Module], number: int):
        super().__init__(cfg, layer_type, number)
        self.prefix = "mtp."

    def chained(self, hidden: Tensor, normed: Tensor) -> Tensor:
        return normed

    def canonical_name(self, name: str) -> str | None:
        own = super().canonical_name(name)
        return None if own is None else own.removeprefix("layers.0.")


def layer_class(target: Target) -> type[MTPLayer]:
    """Return the class of the target's layer for multi-token prediction. Raises ConfigError if the target has no such
    layer."""
    cfg = target.config
    if cfg.num_nextn_predict_layers and isinstance(target.model, Qwen3NextForCausalLM):
        return QwenMTPLayer
    limit = f"a method other than mtp for {cfg.architecture}, which has no layer that predicts further tokens"
    if cfg.latent is not None and cfg.latent.index is not None:
        limit = f"a method other than mtp for {cfg.architecture}, whose attention is sparse"
    elif "model.mtp." in target.model.unused:  # MiMo V2 Flash, LongCat Flash
        limit = f"a method other than mtp for {cfg.architecture}, whose layers for it cannot be computed yet"
    elif cfg.num_nextn_predict_layers and isinstance(target.model, Glm4MoeForCausalLM) and cfg.recurrent is None:
        return MTPLayer
    raise ConfigError("speculative_config.method", "mtp", limit)


def mtp_drafter(target: Target) -> HeadDrafter:
    """Return a drafter with the target's layer for multi-token prediction. Raises ConfigError if the target has no such
    layer."""
    cfg, number, kind = target.config, target.config.num_layers, layer_class(target)
    layer_type = target.model.layer_type
    cfg = replace(
        cfg,
        stage=ALL_LAYERS,
        num_layers=number + 1,
        rope=(*cfg.rope, cfg.rope[-1]),
        window=(*cfg.window, cfg.window[-1]),
        block_types=(*cfg.block_types, "attention") if cfg.block_types else (),
        moe=None if cfg.moe is None else replace(cfg.moe, layers=cfg.moe.layers | {number}),
        max_position_embeddings=cfg.max_position_embeddings + target.block_size,
    )
    layer = build(lambda: kind(cfg, layer_type, number), target.dtype, target.device)
    target.load(layer, target.folder)
    layer.vocabulary.append(target.vocabulary())
    return HeadDrafter(layer, replace(cfg, num_layers=1, block_types=(), recurrent=None), target)

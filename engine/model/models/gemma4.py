"""Gemma 4: Gemma 3 with an embedding of each token for each layer. Some layers read the KV of others. Layers without a
window have heads of another size, and use keys as values. Some models have experts beside the MLP.

https://ai.google.dev/gemma/docs/core; formulas follow transformers' modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.config_parts.gemma import GemmaConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.kv_groups import KVCacheSpec
from engine.model.layers.attention import Attention
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.linear import ReplicatedLinear
from engine.model.layers.moe import Experts, Router
from engine.model.layers.norm import RMSNorm
from engine.model.models.gemma2 import Gemma2ForCausalLM
from engine.model.models.gemma3 import Gemma3Layer
from engine.model.models.llama import LlamaAttention
from engine.model.ops import activation, encoder_attention, norm
from engine.model.shard import Sharded, ShardPlan, Shards, replicated

PADDING = 0


def of_layer(cfg: ModelConfig, layer: int) -> ModelConfig:
    """Return the model's configuration with the sizes of one layer."""
    assert cfg.gemma is not None
    spec = cfg.layer_kv[layer]
    spec = cfg.layer_kv[spec] if isinstance(spec, int) else spec
    assert isinstance(spec, KVCacheSpec)
    size = cfg.gemma.mlp_sizes[layer]
    return replace(cfg, head_dim=spec.head_dim, num_kv_heads=spec.num_kv_heads, intermediate_size=size, moe=None)


class UnweightedRMSNorm(nn.Module):
    """RMSNorm over the last dimension, in float32, without a weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, torch.ones(size)
        self.rms_norm, _ = norm.select(torch.get_default_dtype(), torch.get_default_device())

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, 0.0)


class Gemma4Attention(LlamaAttention):
    """Attention with norms of each head's query, key and value. A layer that reads another layer's KV has only queries.

    cfg: from `of_layer`.
    """

    attend: Attention

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        assert cfg.gemma is not None
        reads_other = isinstance(cfg.kv_specs[layer], int)
        value_is_key = cfg.gemma.value_is_key and cfg.window[layer] is None
        super().__init__(cfg, tp, layer, "q" if reads_other else "qk" if value_is_key else "qkv")
        self.attend.causal = cfg.vision is not None and cfg.vision.causal_without_window and self.attend.window is None
        self.rotate = encoder_attention.select_rotation(self.qkv_proj.dtype, self.qkv_proj.device)
        self.reads_other = reads_other
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        if not self.reads_other:
            self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
            self.v_norm = UnweightedRMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, *kv = self.qkv_proj(x)
        if self.reads_other:
            return self.o_proj(self.read(self.q_norm(q), batch))
        k, v = kv[0], self.v_norm(kv[-1])
        return self.o_proj(self.attend(q, k, v, batch, self.q_norm.of_heads(self.k_norm)))

    def read(self, q: Tensor, batch: Batch) -> Tensor:
        """Attend to the K and V that another layer has written. `kv_place` names that layer. q: normed, but not yet
        rotated."""
        rotated = self.rotate(q, self.attend.table, batch.positions)
        return self.attend.attended(rotated, batch.of_group(self.attend.group, self.attend.causal))


class Gemma4Router(Router):
    """A router that norms the token first, and scales each expert's weight by a factor."""

    weight_name = "proj"

    def __init__(self, cfg: ModelConfig, moe: MoEConfig):
        super().__init__(cfg.hidden_size, moe)
        self.norm = UnweightedRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.factor = cfg.hidden_size**-0.5
        self.scale = nn.Parameter(torch.empty(cfg.hidden_size), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts, weights = super().forward(self.norm(x) * self.scale * self.factor)
        return experts, weights * self.per_expert_scale[experts]

    def shards(self) -> Shards:
        return super().shards() | {name: replicated(getattr(self, name)) for name in ("scale", "per_expert_scale")}


class Gemma4Experts(nn.Module):
    """The experts beside a layer's MLP: (x before the MLP's norm, the MLP's output), both [tokens, hidden] -> the
    same."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, tp: ShardPlan, prefix: str):
        super().__init__()
        self.router = Gemma4Router(cfg, moe)
        names = [f"experts.{i}.{p}" for i in range(moe.num_experts) for p in ("gate_proj", "up_proj", "down_proj")]
        self.experts = Experts(cfg.hidden_size, moe, cfg.activation, tp, cfg.weight_format(prefix, *names))
        self.post_feedforward_layernorm_1 = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_feedforward_layernorm_2 = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, dense: Tensor) -> Tensor:
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        return self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(mixed)


class LayerInput(nn.Module):
    """The contribution of layer embeddings: (x [tokens, hidden], embedding [tokens, size]) -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, size: int):
        super().__init__()
        self.per_layer_input_gate = ReplicatedLinear(cfg.hidden_size, size, bias=False)
        self.per_layer_projection = ReplicatedLinear(size, cfg.hidden_size, bias=False)
        self.post_per_layer_input_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        gate = self.per_layer_input_gate
        self.activation = activation.select(cfg.activation, gate.dtype, gate.device)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        gated = self.activation(torch.cat((self.per_layer_input_gate(x), embedding), dim=-1))
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class LayerEmbeddings(nn.Module):
    """Embeddings of tokens for all layers: (ids [tokens], x [tokens, hidden]) -> [tokens, layers, size]. Each is the
    sum of a learned embedding and a projection of the token's ordinary embedding x."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        gemma: GemmaConfig = cfg.gemma
        size, self.vocab_size = gemma.layer_embedding_size, gemma.layer_vocab_size
        self.shape = cfg.num_layers, size
        self.embed_tokens_per_layer = VocabEmbedding(gemma.layer_vocab_size, cfg.num_layers * size, tp)
        self.per_layer_model_projection = ReplicatedLinear(cfg.hidden_size, cfg.num_layers * size, bias=False)
        self.per_layer_projection_norm = RMSNorm(size, cfg.rms_norm_eps)
        dtype = self.embed_tokens_per_layer.dtype
        self.scale = torch.tensor(size**0.5, device="cpu").to(dtype).item()  # rounded, as in training
        self.projection_scale = cfg.hidden_size**-0.5

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        own = self.embed_tokens_per_layer(input_ids.masked_fill(input_ids >= self.vocab_size, 0)) * self.scale
        projected = (self.per_layer_model_projection(x) * self.projection_scale).unflatten(-1, self.shape)
        return (self.per_layer_projection_norm(projected) + own.unflatten(-1, self.shape)) * 2**-0.5


class Gemma4Layer(Gemma3Layer, Sharded):
    """A residual block with norms on both sides, to which the token's embedding for this layer is added."""

    attention_type = Gemma4Attention
    norm_type = RMSNorm

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__(of_layer(cfg, layer), tp, layer)
        assert cfg.gemma is not None
        self.moe = None if cfg.moe is None else Gemma4Experts(cfg, cfg.moe, tp, f"layers.{layer}")
        size = cfg.gemma.layer_embedding_size
        self.layer_input = LayerInput(cfg, size) if size else None
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch))
        x, normed = self.pre_feedforward_layernorm.add(x, attended)
        mixed = self.mlp(normed)
        if self.moe is not None:
            mixed = self.moe(x, mixed)
        x = x + self.post_feedforward_layernorm(mixed)
        if self.layer_input is not None:
            assert embedding is not None
            x = x + self.layer_input(x, embedding)
        return x * self.layer_scalar, None

    def shards(self) -> Shards:
        return {"layer_scalar": replicated(self.layer_scalar)}


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    layer_type: ClassVar[type[nn.Module]] = Gemma4Layer
    embeddings_type: ClassVar[type[nn.Module]] = LayerEmbeddings

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        assert cfg.gemma is not None
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.layer_embeddings = self.embeddings_type(cfg, tp) if cfg.gemma.layer_embedding_size else None
        self.unused = tuple(  # published checkpoints also have the unused key and value weights of these layers
            f"model.layers.{layer}.self_attn.{name}"
            for layer, spec in enumerate(cfg.kv_specs)
            if isinstance(spec, int)
            for name in ("k_", "v_")
        )

        self.image_token_id = -1 if cfg.vision is None else cfg.vision.image_token_id

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(self.text_ids(input_ids))

    def layer_inputs(self, input_ids: Tensor, x: Tensor) -> Sequence[Tensor]:
        return () if self.layer_embeddings is None else self.layer_embeddings(self.text_ids(input_ids), x).unbind(1)

    def text_ids(self, input_ids: Tensor) -> Tensor:
        """Return the ids with image tokens replaced by the padding token, since image tokens have the layer embeddings
        of padding."""
        return input_ids.masked_fill(input_ids == self.image_token_id, PADDING)

    def checkpoint_name(self, path: str) -> str:
        for part in ("layer_embeddings.", ".layer_input", ".moe"):  # modules that the checkpoint does not have
            path = path.replace(part, "")
        return super().checkpoint_name(path)

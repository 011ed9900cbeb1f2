"""EmbeddingGemma 2, text: Gemma 4's layers over whole texts, in both directions. The embedding of a token for each
layer is a projection of its ordinary embedding. A last projection gives vectors of the embedding's size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.encoder_attention import EncoderAttention
from engine.model.layers.linear import ReplicatedLinear
from engine.model.layers.norm import RMSNorm
from engine.model.models.gemma4 import Gemma4Attention, Gemma4ForCausalLM, Gemma4Layer
from engine.model.shard import ShardPlan


class EmbeddingGemma2Attention(Gemma4Attention):
    def make_attention(self, cfg: ModelConfig, layer: int) -> nn.Module:
        return EncoderAttention(cfg, layer, self.qkv_proj.dtype, self.qkv_proj.device)


class EmbeddingGemma2Layer(Gemma4Layer):
    attention_type = EmbeddingGemma2Attention


class ProjectedEmbeddings(nn.Module):
    """Embeddings of tokens for all layers: (ids, x [tokens, hidden]) -> [tokens, layers, size]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        size = cfg.gemma.layer_embedding_size
        self.shape, self.scale = (cfg.num_layers, size), cfg.hidden_size**-0.5
        self.per_layer_model_projection = ReplicatedLinear(cfg.hidden_size, cfg.num_layers * size, bias=False)
        self.per_layer_projection_norm = RMSNorm(size, cfg.rms_norm_eps)

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        return self.per_layer_projection_norm(
            (self.per_layer_model_projection(x) * self.scale).unflatten(-1, self.shape)
        )


class EmbeddingGemma2Model(Gemma4ForCausalLM):
    layer_type = EmbeddingGemma2Layer
    embeddings_type: ClassVar[type[nn.Module]] = ProjectedEmbeddings

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.embedding_projection = ReplicatedLinear(cfg.hidden_size, cfg.gemma.embedding_size, bias=False)

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        return self.embedding_projection(super().forward(input_ids, batch))

    def checkpoint_name(self, path: str) -> str:
        for own, name in (("layer_embeddings.", "ple."), (".layer_input.", ".ple_block.")):
            path = path.replace(own, name)
        return path if path.startswith(("ple.", "embedding_projection.")) else super().checkpoint_name(path)

"""ModernBERT, arXiv:2412.13663: an encoder with rotary positions, gated MLPs, and windows in most layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.encoder_attention import EncoderAttention
from engine.model.layers.layer_norm import LayerNorm
from engine.model.layers.linear import ReplicatedLinear
from engine.model.models.encoders.bert import Encoder
from engine.model.ops.linear import linear_gelu
from engine.model.shard import ShardPlan


def layer_norm(cfg: ModelConfig) -> LayerNorm:
    assert cfg.encoder is not None
    return LayerNorm(cfg.hidden_size, cfg.encoder.layer_norm_eps, cfg.encoder.norm_bias)


class ModernBertEmbeddings(nn.Module):
    """The embedding, normed: [tokens] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        self.tok_embeddings = VocabEmbedding(cfg.vocab_size, cfg.hidden_size, tp)
        self.norm = layer_norm(cfg)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(input_ids))


class ModernBertAttention(nn.Module):
    """Attention with rotary positions: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.Wqkv = ReplicatedLinear(cfg.hidden_size, 3 * cfg.hidden_size, cfg.output_bias)
        self.attend = EncoderAttention(cfg, layer, self.Wqkv.dtype, self.Wqkv.device)
        self.Wo = ReplicatedLinear(cfg.hidden_size, cfg.hidden_size, cfg.output_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        return self.Wo(self.attend(q, k, v, batch))


class ModernBertMLP(nn.Module):
    """Wo(gelu(gate) * value): [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.Wi = ReplicatedLinear(cfg.hidden_size, 2 * cfg.intermediate_size, cfg.mlp_bias)
        self.Wo = ReplicatedLinear(cfg.intermediate_size, cfg.hidden_size, cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(F.gelu(gate) * value)


class ModernBertLayer(nn.Module):
    """Pre-norm residual blocks: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.attn_norm = layer_norm(cfg) if layer else nn.Identity()  # the embeddings end with a norm
        self.attn = ModernBertAttention(cfg, layer)
        self.mlp_norm = layer_norm(cfg)
        self.mlp = ModernBertMLP(cfg)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attn(self.attn_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class ModernBertHead(nn.Module):
    """The dense layer before the classifier: [rows, hidden] -> [rows, hidden]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        assert cfg.encoder is not None
        self.dense = ReplicatedLinear(cfg.hidden_size, cfg.hidden_size, cfg.encoder.classifier_bias)
        self.norm = layer_norm(cfg)

    def forward(self, x: Tensor) -> Tensor:
        assert self.dense.weight is not None
        return self.norm(linear_gelu(x, self.dense.weight, self.dense.bias))


class ModernBertModel(Encoder):
    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.embeddings = ModernBertEmbeddings(cfg, tp)
        self.layers = nn.ModuleList(ModernBertLayer(cfg, i) for i in range(cfg.num_layers))
        self.final_norm = layer_norm(cfg)
        if cfg.head != "none":
            self.head = ModernBertHead(cfg)
            self.classifier = ReplicatedLinear(cfg.hidden_size, len(cfg.supported_tasks.labels))

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.final_norm(x)

    def scores(self, pooled: Tensor) -> Tensor:
        return self.classifier(self.head(pooled))

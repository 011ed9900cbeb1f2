"""BERT, arXiv:1810.04805, and RoBERTa, arXiv:1907.11692: encoders, whose tokens see each other in both directions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.layer_norm import LayerNorm
from engine.model.layers.linear import ReplicatedLinear
from engine.model.ops import encoder_attention
from engine.model.ops.linear import linear_gelu
from engine.model.shard import ShardPlan
from engine.model.tensor_names import NativeNames


class Encoder(NativeNames, nn.Module):
    """The interface of encoders: input_ids [tokens] int64 of whole sequences -> hidden [tokens, hidden]. Runs on one
    rank, since encoders are small."""

    unused: ClassVar[tuple[str, ...]] = ("model.pooler.", "cls.", "lm_head.", "head.", "decoder.")
    lm_head: ClassVar[None] = None

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        if tp.size > 1:
            raise ConfigError("tensor_parallel_size", tp.size, "1 for an encoder")

    def add_encoders(self) -> None:
        """Add nothing: it reads text only."""

    def scores(self, pooled: Tensor) -> Tensor:
        """Return scores [rows, labels] for pooled [rows, hidden]."""
        raise NotImplementedError


class BertEmbeddings(nn.Module):
    """The sum of a token's embeddings by id, position and type (text of a pair): [tokens] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        assert cfg.encoder is not None
        self.first_position = cfg.encoder.first_position
        positions = cfg.max_position_embeddings + self.first_position
        self.word_embeddings = VocabEmbedding(cfg.vocab_size, cfg.hidden_size, tp)
        self.position_embeddings = VocabEmbedding(positions, cfg.hidden_size, tp)
        self.token_type_embeddings = VocabEmbedding(cfg.encoder.type_vocab_size, cfg.hidden_size, tp)
        self.LayerNorm = LayerNorm(cfg.hidden_size, cfg.encoder.layer_norm_eps)

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        types = batch.token_types if self.token_type_embeddings.vocab_size > 1 else None
        types = torch.zeros_like(input_ids) if types is None else types
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        return self.LayerNorm(x + self.position_embeddings(batch.positions + self.first_position))


class BertOutput(nn.Module):
    """The end of a block: (x [tokens, inputs], residual [tokens, hidden]) -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, inputs: int):
        super().__init__()
        assert cfg.encoder is not None
        self.dense = ReplicatedLinear(inputs, cfg.hidden_size)
        self.LayerNorm = LayerNorm(cfg.hidden_size, cfg.encoder.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    """Attention with its residual: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        size = cfg.num_heads * cfg.head_dim
        self.scale, self.head_dim = cfg.attention_scale, cfg.head_dim
        self.qkv = ReplicatedLinear(cfg.hidden_size, dict.fromkeys(("query", "key", "value"), size))
        self.attend = encoder_attention.select(self.qkv.dtype, self.qkv.device)
        self.output = BertOutput(cfg, size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        return self.output(self.attend(q, k, v, batch, self.scale, None).flatten(1), x)


class BertIntermediate(nn.Module):
    """The first half of an MLP: [tokens, hidden] -> [tokens, intermediate]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = ReplicatedLinear(cfg.hidden_size, cfg.intermediate_size)
        self.dense.takes_addend = False  # one kernel multiplies and applies GELU

    def forward(self, x: Tensor) -> Tensor:
        assert self.dense.weight is not None
        return linear_gelu(x, self.dense.weight, self.dense.bias)


class BertLayer(nn.Module):
    """Post-norm residual blocks: [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attention = BertAttention(cfg)
        self.intermediate = BertIntermediate(cfg)
        self.output = BertOutput(cfg, cfg.intermediate_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention(x, batch)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(cfg) for _ in range(cfg.num_layers))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        for layer in self.layer:
            x = layer(x, batch)
        return x


class BertPooler(nn.Module):
    """A dense layer with tanh: [rows, hidden] -> [rows, hidden]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = ReplicatedLinear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x).tanh()


class BertModel(Encoder):
    packed: ClassVar[dict[str, str]] = {f"qkv.{name}": f"self.{name}" for name in ("query", "key", "value")}

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self.embeddings = BertEmbeddings(cfg, tp)
        self.encoder = BertEncoder(cfg)
        if cfg.head != "none":
            self.add_head(cfg)

    def add_head(self, cfg: ModelConfig) -> None:
        self.pooler = BertPooler(cfg) if cfg.head == "score" else nn.Identity()
        self.classifier: nn.Module = ReplicatedLinear(cfg.hidden_size, len(cfg.supported_tasks.labels))

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        return self.encoder(self.embeddings(input_ids, batch), batch)

    def scores(self, pooled: Tensor) -> Tensor:
        return self.classifier(self.pooler(pooled))


class RobertaClassificationHead(nn.Module):
    """The score head: [rows, hidden] -> [rows, labels]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.dense = ReplicatedLinear(cfg.hidden_size, cfg.hidden_size)
        self.out_proj = ReplicatedLinear(cfg.hidden_size, len(cfg.supported_tasks.labels))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dense(x).tanh())


class RobertaModel(BertModel):
    def add_head(self, cfg: ModelConfig) -> None:
        super().add_head(cfg)
        self.pooler = nn.Identity()
        if cfg.head == "score":
            self.classifier = RobertaClassificationHead(cfg)

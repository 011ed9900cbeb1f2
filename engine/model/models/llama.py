"""Llama 2 and 3: arXiv:2307.09288, arXiv:2407.21783. Other families are written as their differences from this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.layers.attention import Attention
from engine.model.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.model.layers.linear import QKVLinear, ReplicatedLinear, RowParallelLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.norm import RMSNorm
from engine.model.shard import ShardPlan
from engine.model.tensor_names import NativeNames

# Modules have the checkpoint's names, except merged layers: merged layer and part -> name in the checkpoint.
PACKED = {
    "qkv_proj.q": "q_proj",
    "qkv_proj.k": "k_proj",
    "qkv_proj.v": "v_proj",
    "gate_up_proj.gate": "gate_proj",
    "gate_up_proj.up": "up_proj",
}


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions: [tokens, hidden] -> [tokens, hidden]."""

    qkv_type: ClassVar[type[QKVLinear]] = QKVLinear
    name: ClassVar[str] = "self_attn"
    """Name of the module in the checkpoint."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int, parts: str = "qkv"):
        """parts: see QKVLinear."""
        super().__init__()
        prefix = f"layers.{layer}.{self.name}"
        self.qkv_proj = self.qkv_type(cfg, tp, prefix, parts)
        self.attend = self.make_attention(cfg, layer)
        self.o_proj = RowParallelLinear(
            cfg.num_heads * cfg.head_dim, cfg.hidden_size, tp, cfg.output_bias, cfg.weight_format(prefix, "o_proj")
        )

    def make_attention(self, cfg: ModelConfig, layer: int) -> nn.Module:
        return Attention(cfg, layer, self.qkv_proj.dtype, self.qkv_proj.device)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.attend(q, k, v, batch))


class LlamaLayer(nn.Module):
    """A pre-norm residual block: (x, residual), each [tokens, hidden] -> (x, residual).

    The block's result is residual + x; the next norm computes this sum in its own kernel.
    """

    attention_type: ClassVar[type[nn.Module]] = LlamaAttention
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    mlp_type: ClassVar[type[GatedMLP]] = GatedMLP
    mlp_name: ClassVar[str] = "mlp"  # in checkpoints

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        super().__init__()
        self.input_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)
        self.add_mixer(cfg, tp, layer)
        self.post_attention_layernorm = self.norm_type(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = self.make_mlp(cfg, tp, layer)

    def add_mixer(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> None:
        self.self_attn = self.attention_type(cfg, tp, layer)

    def make_mlp(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> nn.Module:
        return self.mlp_type(cfg, tp, f"layers.{layer}.{self.mlp_name}")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        residual, normed = self.input_layernorm.add(residual, x)
        residual, normed = self.post_attention_layernorm.add(residual, self.mix(normed, batch))
        return self.mlp(normed), residual

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply attention, or what a family has instead: [tokens, hidden] -> [tokens, hidden]."""
        return self.self_attn(x, batch)


class LlamaForCausalLM(NativeNames, nn.Module):
    """A causal language model: input_ids [tokens] int64 -> hidden [tokens, hidden]. `logits` and `best` take rows of
    hidden.

    With `aux_layers`, hidden is followed by these layers' inputs: [tokens, (1 + len(aux_layers)) * hidden].
    """

    packed: ClassVar[dict[str, str]] = PACKED
    unused: tuple[str, ...] = ()
    """Prefixes of tensors in the checkpoint that are not used."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose inputs a drafter needs, in ascending order."""
    layer_type: ClassVar[type[nn.Module]] = LlamaLayer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        self.embed_tokens = self.make_embedding(cfg, tp)
        self.layers = nn.ModuleList(self.make_layer(cfg, tp, i) for i in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head: LMHead | None = None
        self.score: ReplicatedLinear | None = None
        if cfg.head == "lm":
            if cfg.tie_word_embeddings:
                self.lm_head = TiedLMHead(self.embed_tokens, cfg.head_format)
            else:
                self.lm_head = LMHead(cfg.vocab_size, cfg.hidden_size, tp, cfg.head_format)
        elif cfg.head != "none":
            bias = cfg.head == "token_score"  # as in transformers
            self.score = ReplicatedLinear(cfg.hidden_size, len(cfg.supported_tasks.labels), bias)

    def make_embedding(self, cfg: ModelConfig, tp: ShardPlan) -> VocabEmbedding:
        return VocabEmbedding(cfg.vocab_size, cfg.hidden_size, tp)

    def make_layer(self, cfg: ModelConfig, tp: ShardPlan, layer: int) -> nn.Module:
        return self.layer_type(cfg, tp, layer)

    def add_encoders(self) -> None:
        """Add what encodes other inputs than text; a model of text has nothing of the kind."""

    def forward(self, input_ids: Tensor, batch: Batch) -> Tensor:
        x = self.embed(input_ids)
        return self.run_layers(x, batch, self.layer_inputs(input_ids, x))

    def run_layers(self, x: Tensor, batch: Batch, inputs: Sequence[Tensor] = ()) -> Tensor:
        """Return hidden [tokens, hidden], followed by the inputs of `aux_layers`. x: [tokens, hidden], embedded tokens.
        inputs: one more input for each layer, in families that have it."""
        residual, aux = None, []
        for i, layer in enumerate(self.layers):
            if i in self.aux_layers:
                aux.append(x if residual is None else residual + x)
            x, residual = layer(x, residual, batch, *inputs[i : i + 1])
            if batch.deepstack is not None and i < len(batch.deepstack.levels):
                x = x.index_add(0, batch.deepstack.rows, batch.deepstack.levels[i])
        hidden = self.norm.add(residual, x)[1]
        return torch.cat((hidden, *aux), dim=-1) if aux else hidden

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def layer_inputs(self, input_ids: Tensor, x: Tensor) -> Sequence[Tensor]:
        """Return the `inputs` of `run_layers`. x: [tokens, hidden], embedded tokens, with embeddings of images."""
        return ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] float32 for hidden [rows, hidden]."""
        assert self.lm_head is not None
        return self.lm_head(hidden)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row, and its id, for hidden [rows, hidden]."""
        assert self.lm_head is not None
        return self.lm_head.best(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """Return scores [rows, labels] for hidden states [rows, hidden], in a model with a score head."""
        assert self.score is not None
        return self.score(hidden)


Model = LlamaForCausalLM  # the interface of every family's class

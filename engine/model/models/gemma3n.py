"""Gemma 3n, text only: like Gemma 4 in attention and layer embeddings, but each token has several hidden states (AltUp,
arXiv:2301.13310), residuals of low rank are learned (LAuReL, arXiv:2411.07501), and the first layers' gates are sparse.

https://ai.google.dev/gemma/docs/gemma-3n; formulas follow transformers' modeling_gemma3n.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.config_parts.gemma import GemmaConfig
from engine.model.layers.linear import ReplicatedLinear
from engine.model.layers.mlp import GatedMLP
from engine.model.layers.norm import RMSNorm
from engine.model.models.gemma3 import Gemma3Layer
from engine.model.models.gemma4 import Gemma4Attention, Gemma4ForCausalLM, LayerInput, of_layer
from engine.model.shard import Sharded, ShardPlan, Shards, replicated

LEAST_MEAN_SQUARE = 1e-5


class SparseMLP(GatedMLP):
    """A gated MLP whose gates are reduced by a threshold and cut at 0. The threshold is the `sparsity` quantile of a
    normal distribution with the mean and standard deviation of the token's gates."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, prefix: str, sparsity: float):
        super().__init__(cfg, tp, prefix)
        self.tp, self.deviations = tp, NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gates = self.tp.ranks.all_gather(gate.contiguous()) if self.tp.size > 1 else gate
        mean = gates.float().mean(-1, keepdim=True)
        deviation = (gates.float() - mean).square().mean(-1, keepdim=True).sqrt()
        gate = torch.relu(gate - (mean + deviation * self.deviations).to(x.dtype))
        return self.down_proj(self.activation(torch.cat((gate, up), dim=-1)))


class Laurel(nn.Module):
    """A learned residual of low rank, x + norm(right(left(x))): [tokens, hidden] -> [tokens, hidden]."""

    def __init__(self, cfg: ModelConfig, rank: int):
        super().__init__()
        self.linear_left = ReplicatedLinear(cfg.hidden_size, rank, bias=False)
        self.linear_right = ReplicatedLinear(rank, cfg.hidden_size, bias=False)
        self.post_laurel_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class AltUp(Sharded):
    """Alternating updates: a layer computes one of a token's hidden states (streams); the others are predicted.

    Each stream is [tokens, hidden].
    """

    def __init__(self, cfg: ModelConfig, gemma: GemmaConfig):
        super().__init__()
        self.streams, self.active = gemma.streams, gemma.active_stream
        self.modality_router = ReplicatedLinear(cfg.hidden_size, self.streams, bias=False)
        self.prediction_coefs = ReplicatedLinear(self.streams, self.streams**2, bias=False)
        self.correction_coefs = ReplicatedLinear(self.streams, self.streams, bias=False)
        self.router_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.router_scale = 1 / cfg.hidden_size
        self.correct_output_scale = nn.Parameter(torch.empty(cfg.hidden_size), requires_grad=False)

    def modalities(self, x: Tensor) -> Tensor:
        """Return the router's outputs for x [tokens, hidden]: [tokens, streams]."""
        return torch.tanh(self.modality_router(self.router_norm(x) * self.router_scale).float()).to(x.dtype)

    def predict(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """Predict the streams after the layer."""
        coefs = self.prediction_coefs(self.modalities(streams[self.active])).unflatten(-1, (self.streams, self.streams))
        return [weighted(coefs[:, i], streams) + stream for i, stream in enumerate(streams)]

    def correct(self, predicted: Sequence[Tensor], computed: Tensor) -> list[Tensor]:
        """Correct the predicted streams. computed: the layer's output for the active stream."""
        coefs = self.correction_coefs(self.modalities(computed)) + 1.0
        surprise = computed - predicted[self.active]
        return [surprise * coefs[:, i : i + 1] + stream for i, stream in enumerate(predicted)]

    def shards(self) -> Shards:
        return {"correct_output_scale": replicated(self.correct_output_scale)}


def weighted(weights: Tensor, streams: Sequence[Tensor]) -> Tensor:
    """Sum the streams one by one, so that a token has the same bits in any batch. weights: [tokens, streams]"""
    total = weights[:, :1] * streams[0]
    for i, stream in enumerate(streams[1:], 1):
        total = total + weights[:, i : i + 1] * stream
    return total


class Gemma3nLayer(Gemma3Layer):
    """A layer of Gemma 3n over all streams: x [streams, tokens, hidden]."""

    attention_type = Gemma4Attention
    norm_type = RMSNorm

    def __init__(self, cfg: ModelConfig, tp: ShardPlan, layer: int):
        own, gemma = of_layer(cfg, layer), cfg.gemma
        assert gemma is not None
        super().__init__(own, tp, layer)
        if gemma.sparsity and gemma.sparsity[layer] > 0:
            self.mlp = SparseMLP(own, tp, f"layers.{layer}.mlp", gemma.sparsity[layer])
        self.altup, self.laurel = AltUp(cfg, gemma), Laurel(cfg, gemma.laurel_rank)
        self.layer_input = LayerInput(cfg, gemma.layer_embedding_size)
        self.scale_active = gemma.scale_active

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert embedding is not None
        predicted = self.altup.predict(x.unbind())
        active = predicted[self.altup.active]
        normed = self.input_layernorm(active)
        attended = active + self.post_attention_layernorm(self.self_attn(normed, batch))
        attended = (attended + self.laurel(normed)) * 2**-0.5
        mixed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(attended)))
        corrected = self.altup.correct(predicted, attended + mixed)
        first = corrected[self.altup.active]
        if self.scale_active:
            first = first * self.altup.correct_output_scale
        added = self.layer_input(first, embedding)
        return torch.stack([corrected[0], *(stream + added for stream in corrected[1:])]), None


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    layer_type = Gemma3nLayer

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        assert cfg.gemma is not None
        self.active_stream = cfg.gemma.active_stream
        others, size = range(1, cfg.gemma.streams), cfg.hidden_size
        self.altup_projections = nn.ModuleList(ReplicatedLinear(size, size, bias=False) for _ in others)
        self.altup_unembed_projections = nn.ModuleList(ReplicatedLinear(size, size, bias=False) for _ in others)

    def run_layers(self, x: Tensor, batch: Batch, inputs: Sequence[Tensor] = ()) -> Tensor:
        streams, aux = torch.stack([x, *(sized_like(x, projection(x)) for projection in self.altup_projections)]), []
        for i, (layer, embedding) in enumerate(zip(self.layers, inputs, strict=True)):
            if i in self.aux_layers:
                aux.append(streams[self.active_stream])
            streams, _ = layer(streams, None, batch, embedding)
        total = streams[0]
        for stream, projection in zip(streams[1:], self.altup_unembed_projections, strict=True):
            total = total + sized_like(streams[0], projection(stream))
        hidden = self.norm(total / len(streams))
        return torch.cat((hidden, *aux), dim=-1) if aux else hidden


def sized_like(x: Tensor, other: Tensor) -> Tensor:
    """Scale each row of `other` [tokens, hidden] to the mean square of that row in x."""
    wanted, found = (y.float().square().mean(-1, keepdim=True) for y in (x, other))
    return (other * wanted.sqrt() / found.clamp(min=LEAST_MEAN_SQUARE).sqrt()).to(x.dtype)

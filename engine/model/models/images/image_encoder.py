"""The model of an encode pool: a vision encoder without a language model. Its embeddings are kept as KV.

Its engine is like any other. A prompt consists of one image's placeholders; a step encodes the image and writes its
embeddings where the KV of these tokens would be. So blocks, leases and transports work as for prompts, and the prefix
cache finds images by their hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.shard import ShardPlan
from engine.model.tensor_names import NativeNames, is_of_text
from engine.model.transformers_backend.vision import VisionEncoder


class ImageEncoder(NativeNames, nn.Module):
    """The vision encoder with the interface of LlamaForCausalLM. Every token that it samples is 0."""

    unused: tuple[str, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__()
        assert cfg.vision is not None
        self._vision_config = cfg.vision
        self.vision: VisionEncoder | None = None
        self._hidden_size, self._dtype = cfg.hidden_size, torch.get_default_dtype()

    def add_encoders(self) -> None:
        self.vision = VisionEncoder(self._vision_config)

    def embed(self, input_ids: Tensor) -> Tensor:
        return torch.zeros(len(input_ids), self._hidden_size, dtype=self._dtype, device=input_ids.device)

    def layer_inputs(self, input_ids: Tensor, x: Tensor) -> Sequence[Tensor]:
        return ()

    def run_layers(self, x: Tensor, batch: Batch, inputs: Sequence[Tensor] = ()) -> Tensor:
        """Write a step's embeddings [tokens, hidden] and deepstack features to the KV cache."""
        self._keep(x, 0, batch.slot_mapping, batch)
        if batch.deepstack is not None:
            for i, level in enumerate(batch.deepstack.levels, 1):
                self._keep(level, i, batch.slot_mapping[batch.deepstack.rows], batch)
        return x

    def _keep(self, values: Tensor, layer: int, slots: Tensor, batch: Batch) -> None:
        """Write values [n, hidden] to `slots` [n] of a layer in the KV cache."""
        size = batch.kv_cache.shape[4]
        batch.kv_cache[slots // size, layer, :, 0, slots % size] = values.view(len(values), 2, -1)

    def canonical_name(self, name: str) -> str | None:
        assert self.vision is not None
        return None if is_of_text(name) else self.vision.canonical_name(name)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each row of hidden [rows, hidden], a number that is finite if the embedding is finite, and token
        0."""
        return hidden.sum(-1), torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)

"""What a pipeline stage has in place of the parts of a model that other stages hold: see model/stage.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.batch import Batch
from engine.model.layers.embedding import VocabEmbedding
from engine.model.layers.norm import RMSNorm
from engine.model.shard import Sharded, Shards


class OtherLayer(nn.Module):
    """Stands for a layer of another stage, and returns its inputs."""

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, *inputs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return x, residual


class NoEmbedding(VocabEmbedding):
    """Stands for the embedding of another stage: [tokens] -> zeros [tokens, hidden], for steps that measure memory."""

    def __init__(self, hidden_size: int):
        Sharded.__init__(self)
        self.hidden_size = hidden_size

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), self.hidden_size, dtype=self.dtype, device=self.device)

    def shards(self) -> Shards:
        return {}


class StageOutput(RMSNorm):
    """Stands for the last norm, in all stages but the last. Returns the sum that the next stage's first norm would
    compute: the same kernel adds, so the bits are the same."""

    def __init__(self, size: int):
        super().__init__(size, 1.0)
        nn.init.ones_(self.weight)

    def add(self, residual: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x if residual is None else super().add(residual, x)[0]
        return total, total

    def shards(self) -> Shards:
        return {}

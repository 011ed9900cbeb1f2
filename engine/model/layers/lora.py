"""The part of a linear layer that low-rank adapters add to its product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.low_rank import AdapterRows, LowRankWeights
from engine.model.ops.lora import low_rank
from engine.model.shard import Shard


class LinearAdapters:
    """The adapters of one linear layer on this rank: their factors in every slot, and the rows of the step that have
    one."""

    def __init__(
        self,
        shards: Sequence[Shard],
        slots: int,
        rank: int,
        rows: AdapterRows,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """shards: of the layer's weights, whose outputs lie side by side. rank: the highest of an adapter."""
        sizes = [shard.local_shape[0] for shard in shards]
        self.shards, self.rows = shards, rows
        self.weights = LowRankWeights.allocate(slots, shards[0].local_shape[1], sizes, rank, dtype, device)
        self._add = low_rank.select(dtype, device)

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """outs: [tokens, outputs or more], products of that many parts of the inputs x [tokens, inputs]."""
        self._add(outs, x, self.weights, self.rows)


class NoAdapters:
    """Adds nothing."""

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        pass


NO_ADAPTERS = NoAdapters()

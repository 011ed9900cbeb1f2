"""The part of a linear layer that low-rank adapters add to its product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.model.ops.lora import low_rank
from engine.model.ops.lora.low_rank import AdapterRows, LowRankWeights

if TYPE_CHECKING:
    from engine.model.layers.linear import Linear


class LinearAdapters:
    """What adapters add to the product of one linear layer, on this rank: their factors in every slot, and the rows of
    the step that have one."""

    def __init__(self, linear: Linear, slots: int, rank: int, rows: AdapterRows):
        shards = list(linear.weights.values())
        sizes = [shard.local_shape[0] for shard in shards]
        self.shards, self.rows = shards, rows
        self.weights = LowRankWeights.allocate(
            slots, shards[0].local_shape[1], sizes, rank, linear.dtype, linear.device
        )
        self._add = low_rank.select(linear.dtype, linear.device)

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """outs: [tokens, outputs or more], products of that many parts of the inputs x [tokens, inputs]."""
        self._add(outs, x, self.weights, self.rows)


class NoAdapters:
    """Adds nothing."""

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        pass


NO_ADAPTERS = NoAdapters()

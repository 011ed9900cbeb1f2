"""What low-rank adapters add to the products of layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.model.low_rank import AdapterRows, Factors, LowRankWeights, row_table
from engine.model.ops.lora import low_rank
from engine.model.shard import Shard, Sharded


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

    def empty_factors(self, rank: int) -> Factors:
        return self.weights.empty_factors(rank)

    def write(self, slot: int, factors: Factors | None) -> None:
        self.weights.write(slot, factors)


class GroupedAdapters:
    """The adapters of many products of the same sizes, one for each expert or each head, on a CPU. Only adapters that
    change them take memory, which is that of the host's copy."""

    def __init__(
        self, shards: Sequence[Shard], products: int, rows: AdapterRows, dtype: torch.dtype, device: torch.device
    ):
        """shards: of each product's weights, whose outputs lie side by side."""
        sizes = [shard.local_shape[0] for shard in shards]
        self.shards, self.rows, self._products = shards, rows, products
        self._sizes = LowRankWeights.allocate(0, shards[0].local_shape[1], sizes, 0, dtype, device)
        self._weights: dict[int, LowRankWeights] = {}  # by slot; in these, each product has a slot
        self._add = low_rank.select(dtype, device)

    def add_each(self, out: Tensor, x: Tensor) -> None:
        """out [tokens, products, outputs], contiguous, x [tokens, products, inputs]."""
        if self.rows.any:
            tokens, products = torch.meshgrid(torch.arange(len(x)), torch.arange(self._products), indexing="ij")
            self.add(out.flatten(0, 1), x.flatten(0, 1), products.flatten(), tokens.flatten())

    def add(self, out: Tensor, x: Tensor, products: Tensor, tokens: Tensor) -> None:
        """out [pairs, outputs], x [pairs, inputs]: of pairs of a token and a product."""
        if not self.rows.any:
            return
        slots, chosen = self.rows.slots()[tokens.numpy()], products.numpy()
        for slot in np.unique(slots[slots >= 0]).tolist():
            if slot in self._weights:
                rows = AdapterRows(len(x), x.device)
                rows.begin(torch.from_numpy(row_table(np.where(slots == slot, chosen, -1), rows.tile_rows)))
                self._add([out], x, self._weights[slot], rows)

    def empty_factors(self, rank: int) -> Factors:
        return self._sizes.empty_factors(rank, self._products)

    def write(self, slot: int, factors: Factors | None) -> None:
        if factors is None:
            self._weights.pop(slot, None)
        else:
            self._weights[slot] = self._sizes.of_products(factors)


class NoAdapters:
    """Adds nothing."""

    def add(self, *_: object) -> None:
        pass

    add_each = add


NO_ADAPTERS = NoAdapters()


class Adapted(Sharded):
    """A layer to whose product adapters may add.

    weights: this rank's shards, which are stacked along the outputs, by their names in the checkpoint.
    """

    takes_adapters = True  #: the layer calls `adapters.add` with all of its products
    weights: dict[str, Shard]
    adapters: LinearAdapters | NoAdapters = NO_ADAPTERS

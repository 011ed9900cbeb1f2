"""Adds low-rank adapters to the products of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.model.low_rank import AdapterRows, Factors, LowRankWeights, as_matrix, filled, in_columns, row_table
from engine.model.ops.lora import low_rank
from engine.model.shard import INPUTS, Shard


class LinearAdapters:
    """The adapters of one linear layer on this rank: the factors in every slot, and the slot of each row of a step."""

    def __init__(
        self,
        shards: Sequence[Shard],
        slots: int,
        rank: int,
        rows: AdapterRows,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """shards: shards of the layer's weights, stacked along the outputs. rank: the highest rank of an adapter."""
        sizes = [shard.local_shape[0] for shard in shards]
        self.shards, self.rows = shards, rows
        self.weights = LowRankWeights.allocate(slots, shards[0].local_shape[1], sizes, rank, dtype, device)
        self._add = low_rank.select(dtype, device)

    def add(self, outs: Sequence[Tensor], x: Tensor) -> None:
        """Add each row's adapter to `outs`, the products of parts of the inputs x [tokens, inputs]: each is
        [tokens, outputs or more]."""
        self._add(outs, x, self.weights, self.rows)

    def empty_factors(self, rank: int) -> Factors:
        return self.weights.empty_factors(rank)

    def write(self, slot: int, factors: Factors | None) -> None:
        self.weights.write(slot, factors)


class GroupedAdapters:
    """The adapters of many products of equal sizes, one per expert or per head, on a CPU. Only adapters that change
    these products take memory, and they share the host's copy of the factors unless products are cut into parts."""

    def __init__(
        self,
        shards: Sequence[Shard],
        products: int,
        rows: AdapterRows,
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 1,
    ):
        """shards: shards of each product's weights, stacked along the outputs. parts: number of parts into which each
        weight is cut, along the dimension that is split over the ranks."""
        inputs, sizes = shards[0].local_shape[1], [shard.local_shape[0] for shard in shards]
        self.shards, self.rows, self._products, self._parts = shards, rows, products, parts
        self._cuts_inputs = shards[0].dim == INPUTS
        self._outputs = [size // (1 if self._cuts_inputs else parts) for size in sizes]  # of a part, of each slice
        self._sizes = LowRankWeights.allocate(0, inputs, sizes, 0, dtype, device)
        inputs //= parts if self._cuts_inputs else 1
        self._part = LowRankWeights.allocate(0, inputs, self._outputs, 0, dtype, device)
        self._weights: dict[int, list[LowRankWeights]] = {}  # by slot, of each part; in these, each product has a slot
        self._add = low_rank.select(dtype, device)

    def add_each(self, out: Tensor, x: Tensor) -> None:
        """Add each token's adapter to all products. out: [tokens, products, outputs], contiguous; x: [tokens, products,
        inputs]."""
        if self.rows.any:
            tokens, products = torch.meshgrid(torch.arange(len(x)), torch.arange(self._products), indexing="ij")
            self.add(out.flatten(0, 1), x.flatten(0, 1), products.flatten(), tokens.flatten())

    def add(self, out: Tensor, x: Tensor, products: Tensor, tokens: Tensor, part: int = 0) -> None:
        """Add adapters to one part of the products, for pairs of a token and a product. out: [pairs, outputs]; x:
        [pairs, inputs]."""
        if not self.rows.any:
            return
        slots, chosen = self.rows.slots()[tokens.numpy()], products.numpy()
        for slot in np.unique(slots[slots >= 0]).tolist():
            if slot in self._weights:
                rows = AdapterRows(len(x), x.device)
                rows.begin(torch.from_numpy(row_table(np.where(slots == slot, chosen, -1), rows.tile_rows)))
                self._add([out], x, self._weights[slot][part], rows)

    def empty_factors(self, rank: int) -> Factors:
        return self._sizes.empty_factors(rank, self._products)

    def write(self, slot: int, factors: Factors | None) -> None:
        if factors is None:
            self._weights.pop(slot, None)
        else:
            self._weights[slot] = [self._part.of_products(part) for part in self._cut(factors)]

    def _cut(self, factors: Factors) -> list[Factors]:
        """Return the factors of each part. Parts along the outputs share A, and parts along the inputs share B."""
        if self._parts == 1:
            return [factors]
        if self._cuts_inputs:
            return [replace(factors, a=a.contiguous()) for a in factors.a.chunk(self._parts, dim=3)]
        widths = [filled(self._parts * size) for size in self._outputs]
        slices = [
            [in_columns(own) for own in b[..., : self._parts * size].split(size, dim=-1)]
            for b, size in zip(as_matrix(factors.b).split(widths, dim=-1), self._outputs, strict=True)
        ]
        return [replace(factors, b=torch.cat(own, dim=1)) for own in zip(*slices, strict=True)]

"""Random adapters in the slots of one linear layer, and rows that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.low_rank import AdapterRows, LowRankWeights, filled, row_table
from engine.model.ops.lora.low_rank import add_plain

CPU = torch.device("cpu")


@dataclass
class Case:
    weights: LowRankWeights
    slots: list[int]
    x: Tensor
    outs: list[Tensor]

    @classmethod
    def make(
        cls, slots: Sequence[int], *, inputs: int = 40, slices: Sequence[int] = (24, 8, 8),
        ranks: Sequence[int] = (16, 32, 0), parts: int = 1, dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Case:  # fmt: skip
        """slots: of each row, -1 for none. ranks: of the adapter in each slot."""
        generator = torch.Generator().manual_seed(len(slots) + inputs)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        rank = filled(max(ranks))
        weights = LowRankWeights.allocate(len(ranks), inputs, slices, rank, dtype, device)
        weights.a.copy_(randn(*weights.a.shape) / inputs**0.5)
        weights.b.copy_(randn(*weights.b.shape))
        weights.ranks.copy_(torch.tensor(ranks))
        wide = randn(len(slots), parts * (sum(slices) + 3))  # as in a padded layer, and as parts lie side by side
        return cls(weights, list(slots), randn(len(slots), inputs), list(wide.chunk(parts, dim=1)))

    def rows(self, tile_rows: int, chosen: Sequence[int] | None = None) -> AdapterRows:
        slots = [self.slots[i] for i in (range(len(self.slots)) if chosen is None else chosen)]
        rows = AdapterRows(len(slots), self.x.device)
        rows.tile_rows = tile_rows
        if max(slots) >= 0:
            table = row_table(np.array(slots, dtype=np.int32), tile_rows)
            rows.begin(torch.from_numpy(table).to(self.x.device))
        return rows

    def result(self, add, chosen: Sequence[int] | None = None, tile_rows: int = 4) -> list[Tensor]:
        """The outputs of all rows, or of the chosen ones alone."""
        index = list(range(len(self.slots))) if chosen is None else list(chosen)
        wide = torch.cat(self.outs, dim=1)[index]
        outs = list(wide.chunk(len(self.outs), dim=1))
        add(outs, self.x[index], self.weights, self.rows(tile_rows, chosen))
        return outs

    def expected(self) -> list[Tensor]:
        return self.result(add_plain)

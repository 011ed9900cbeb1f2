"""The factors of low-rank adapters in the slots of a linear layer, and the slot of each row of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 16  # to a multiple of which ranks, and the outputs of a slice, are filled up with zeros
BLOCK = 128  # outputs of a slice that a kernel takes at a time
TILE_ROWS = {"cpu": 4, "cuda": 16, "meta": 1}  # rows of one adapter that a kernel takes at a time


class AdapterRows:
    """The rows of the current step that have an adapter, in memory whose address never changes.

    table: int32; the number of tiles; then slot, first index and number of rows of each tile; then the rows sorted by
    slot, to which the tiles' indices refer.
    """

    def __init__(self, max_tokens: int, device: torch.device):
        self.tile_rows = TILE_ROWS[device.type]
        self.table = torch.zeros(1 + 4 * max_tokens, dtype=torch.int32, device=device)
        self.any = False
        """Whether any row has an adapter; the host knows this without asking the device."""

    def begin(self, table: Tensor | None) -> None:
        """Take the table of a step, as returned by `row_table`; None if no row has an adapter."""
        if table is not None:
            self.table[: len(table)] = table
        elif self.any:
            self.table[0] = 0
        self.any = table is not None

    def slots(self) -> NDArray[np.int32]:
        """Read each row's slot from the device; -1 for none."""
        found = np.full(len(self.table) // 4, -1, dtype=np.int32)
        for slot, rows in self.tiles():
            found[rows] = slot
        return found

    def tiles(self) -> list[tuple[int, list[int]]]:
        """Read each tile's slot and rows from the device."""
        count = int(self.table[0])
        tiles = self.table[1 : 1 + 3 * count].view(count, 3).tolist()
        rows = self.table[1 + 3 * count :]
        return [(slot, rows[first : first + size].tolist()) for slot, first, size in tiles]


def row_table(slots: NDArray[np.int32], tile_rows: int) -> NDArray[np.int32]:
    """Return the table of AdapterRows. slots: [tokens], slot of each row's adapter; -1 for none."""
    rows = np.flatnonzero(slots >= 0)
    rows = rows[np.argsort(slots[rows], kind="stable")]
    found, starts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    tiles = [
        (slot, start + first, min(tile_rows, count - first))
        for slot, start, count in zip(found.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for first in range(0, count, tile_rows)
    ]
    return np.concatenate([[len(tiles)], np.array(tiles).reshape(-1), rows]).astype(np.int32)


def filled(size: int) -> int:
    return -(-size // LANES) * LANES


@dataclass(slots=True)
class Factors:
    """One adapter's factors for products of equal sizes: a single product, or one for each expert or head."""

    a: Tensor
    """[products, inputs, slices, rank]; see LowRankWeights."""
    b: Tensor
    """[products, rank, outputs]"""
    used: list[bool]
    """For each product, whether the adapter changes it."""


@dataclass(slots=True)
class LowRankWeights:
    """The factors of one linear layer in all slots. The layer's outputs consist of slices that lie side by side, and
    each slice has its own A."""

    a: Tensor
    """[slots, inputs, slices * rank]: A of all slices, transposed."""
    b: Tensor
    """[slots, rank, outputs]: B, transposed, each slice's outputs filled up to a multiple of LANES."""
    ranks: Tensor
    """[slots] int32: the rank of each slot's adapter. Further columns of A and rows of B are not used. 0 if the adapter
    does not change this layer."""
    blocks: Tensor
    """[blocks, 4] int32: first output, number of outputs, slice and first column of `b`."""
    rank: int
    """The highest rank that an adapter may have, a multiple of LANES."""
    slices: int

    @classmethod
    def allocate(
        cls, slots: int, inputs: int, slices: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device
    ) -> LowRankWeights:
        """Allocate empty slots. slices: number of outputs of each slice."""
        rank, blocks, start, column = filled(rank), [], 0, 0
        for i, size in enumerate(slices):
            blocks += [(start + o, min(BLOCK, size - o), i, column + o) for o in range(0, size, BLOCK)]
            start, column = start + size, column + filled(size)
        return cls(
            a=torch.zeros(slots, inputs, len(slices) * rank, dtype=dtype, device=device),
            b=torch.zeros(slots, rank, column, dtype=dtype, device=device),
            ranks=torch.zeros(slots, dtype=torch.int32, device=device),
            blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
            rank=rank,
            slices=len(slices),
        )

    def empty_factors(self, rank: int, products: int = 1) -> Factors:
        """Return zeroed factors to fill in. rank: a multiple of LANES."""
        a = torch.zeros(products, self.a.shape[1], self.slices, rank, dtype=self.a.dtype)
        return Factors(a, torch.zeros(products, rank, self.b.shape[2], dtype=self.b.dtype), [False] * products)

    def write(self, slot: int, factors: Factors | None) -> None:
        """Copy the factors of one product into a slot; None for an adapter that does not change this layer."""
        if factors is None:
            self.ranks[slot] = 0
            return
        _, inputs, slices, rank = factors.a.shape
        self.a[slot].view(inputs, slices, self.rank)[:, :, :rank] = factors.a[0]
        self.b[slot, :rank] = factors.b[0]
        self.ranks[slot] = rank

    def of_products(self, factors: Factors) -> LowRankWeights:
        """Return the factors of many products of these sizes. Each product gets its own slot."""
        rank = factors.a.shape[3]
        ranks = torch.tensor([rank * used for used in factors.used], dtype=torch.int32)
        return replace(self, a=factors.a.flatten(2), b=factors.b, ranks=ranks, rank=rank)

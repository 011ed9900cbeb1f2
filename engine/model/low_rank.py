"""The factors of low-rank adapters in the slots of a linear layer, and the slot of each row of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

LANES = 16  # columns of a factor that lie side by side. Ranks and outputs are filled up with zeros to a multiple of it
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
        self._max_tokens, self._scratch = max_tokens, torch.empty(0, dtype=torch.uint8, device=device)

    def begin(self, table: Tensor | None) -> None:
        """Take the table of a step, as returned by `row_table`; None if no row has an adapter."""
        if table is not None:
            self.table[: len(table)] = table
        elif self.any:
            self.table[0] = 0
        self.any = table is not None

    def scratch(self, width: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory [max_tokens, width] for the products of a layer's inputs with A. All layers share
        it, one after another."""
        size = self._max_tokens * width * dtype.itemsize
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._scratch.device)
        return self._scratch[:size].view(dtype).view(-1, width)

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


def in_columns(matrix: Tensor) -> Tensor:
    """Return a matrix in the order in which kernels read it: [..., rows, columns] -> [..., columns / LANES, rows,
    LANES]. The columns are padded with zeros."""
    matrix = F.pad(matrix, (0, filled(matrix.shape[-1]) - matrix.shape[-1]))
    return matrix.unflatten(-1, (-1, LANES)).transpose(-2, -3)


def as_matrix(columns: Tensor) -> Tensor:
    """Undo `in_columns`."""
    return columns.transpose(-2, -3).flatten(-2)


@dataclass(slots=True)
class Factors:
    """One adapter's factors for products of equal sizes: a single product, or one for each expert or head."""

    a: Tensor
    """[products, slices, rank / LANES, inputs, LANES]; see LowRankWeights."""
    b: Tensor
    """[products, outputs / LANES, rank, LANES]"""
    used: list[bool]
    """For each product, whether the adapter changes it."""


@dataclass(slots=True)
class LowRankWeights:
    """The factors of one linear layer in all slots. The layer's outputs consist of slices that lie side by side, and
    each slice has its own A."""

    a: Tensor
    """[slots, slices * rank / LANES, inputs, LANES]: A of all slices, transposed, `in_columns`."""
    b: Tensor
    """[slots, outputs / LANES, rank, LANES]: B, transposed, `in_columns`, each slice's outputs filled up."""
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
            a=torch.zeros(slots, len(slices) * rank // LANES, inputs, LANES, dtype=dtype, device=device),
            b=torch.zeros(slots, column // LANES, rank, LANES, dtype=dtype, device=device),
            ranks=torch.zeros(slots, dtype=torch.int32, device=device),
            blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
            rank=rank,
            slices=len(slices),
        )

    def empty_factors(self, rank: int, products: int = 1) -> Factors:
        """Return zeroed factors to fill in. rank: a multiple of LANES."""
        a = torch.zeros(products, self.slices, rank // LANES, self.a.shape[2], LANES, dtype=self.a.dtype)
        b = torch.zeros(products, self.b.shape[1], rank, LANES, dtype=self.b.dtype)
        return Factors(a, b, [False] * products)

    def write(self, slot: int, factors: Factors | None) -> None:
        """Copy the factors of one product into a slot; None for an adapter that does not change this layer."""
        if factors is None:
            self.ranks[slot] = 0
            return
        rank = factors.b.shape[2]
        self.a[slot].unflatten(0, (self.slices, -1))[:, : rank // LANES] = factors.a[0]
        self.b[slot, :, :rank] = factors.b[0]
        self.ranks[slot] = rank

    def of_products(self, factors: Factors) -> LowRankWeights:
        """Return the factors of many products of these sizes. Each product gets its own slot."""
        rank = factors.b.shape[2]
        ranks = torch.tensor([rank * used for used in factors.used], dtype=torch.int32)
        return replace(self, a=factors.a.flatten(1, 2), b=factors.b, ranks=ranks, rank=rank)

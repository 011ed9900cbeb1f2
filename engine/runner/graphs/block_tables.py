"""Block tables that the device keeps, and the changes that it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.devices.device import StagedCopy
from engine.model.batch import Batch
from engine.wire.plan import BlockChange


@dataclass(frozen=True, slots=True)
class BlockTableRows:
    """The rows that a batch takes from the device's block tables [groups, slots, blocks] int32, and the changes to
    apply to the tables first."""

    rows: Tensor  #: [seqs] int64
    width: int  #: entries of each row that the batch needs
    index: Tensor  #: [n] int64, changed entries of the flattened tables of all groups
    blocks: Tensor  #: [n] int32, their new values

    @classmethod
    def of(
        cls, changes: Sequence[BlockChange], tables: np.ndarray, slots: np.ndarray, width: int, staged: StagedCopy
    ) -> BlockTableRows:
        """Return the rows of some slots. changes: since the last call. tables: [groups, slots, blocks] int32, after the
        changes."""
        _, slots_of_group, entries = tables.shape
        ranges = [
            (c.group * slots_of_group + c.slot) * entries + np.arange(c.index, c.index + len(c.blocks)) for c in changes
        ]
        index = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        # final values, since an entry may change twice and the device writes in any order
        blocks = tables.reshape(-1)[index]
        return cls(staged.add(slots), width, staged.add(index), staged.add(blocks))

    def apply(self, tables: Tensor) -> None:
        """Apply the changes."""
        if len(self.index):
            tables.view(-1)[self.index] = self.blocks

    def give(self, tables: Tensor, batch: Batch) -> None:
        """Give the batch its rows."""
        batch.set_block_tables(tables[:, :, : self.width].index_select(1, self.rows).unbind())

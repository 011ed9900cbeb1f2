"""The sequences of a step in the form that CPU kernels of recurrent layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.batch import Batch
from engine.model.state import state_rows

SEQUENCE_NUMBERS = 6
SEQUENCE_BYTES = 8 * SEQUENCE_NUMBERS
TABLE = "sequences"  #: its key in `StateBatch.plans`


def sequence_table(batch: Batch) -> Tensor:
    """Return [1 + seqs, SEQUENCE_NUMBERS] int64: the number of sequences and the most rows of one, then the StateRows
    of each. Made once per step, for all layers."""
    assert batch.states is not None
    plans = batch.states.plans
    if TABLE not in plans:
        seqs = state_rows(batch)
        longest = max((seq.last - seq.first for seq in seqs), default=0)
        plans[TABLE] = torch.tensor([(len(seqs), longest, 0, 0, 0, 0), *seqs], dtype=torch.int64)
    table: Tensor = plans[TABLE]
    return table

"""The sequences of a step in the form that CPU kernels of recurrent layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.batch import Batch, state_rows


def sequence_table(batch: Batch) -> Tensor:
    """Return [seqs, 6] int64, the StateRows of each sequence. Made once per step, for all layers."""
    assert batch.states is not None
    plans = batch.states.plans
    if "sequences" not in plans:
        plans["sequences"] = torch.tensor(state_rows(batch), dtype=torch.int64)
    table: Tensor = plans["sequences"]
    return table

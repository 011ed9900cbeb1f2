"""The sequences of a step, as kernels of recurrent layers on a CPU read them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.batch import Batch, state_rows


def sequence_table(batch: Batch) -> Tensor:
    """[seqs, 6] int64: the StateRows of each, made once for all layers of a step."""
    assert batch.states is not None
    plans = batch.states.plans
    if "sequences" not in plans:
        plans["sequences"] = torch.tensor(state_rows(batch), dtype=torch.int64)
    table: Tensor = plans["sequences"]
    return table

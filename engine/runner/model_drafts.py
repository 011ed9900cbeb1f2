"""Drafts of a drafter with weights: what it sees of a step that has been sampled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device import copy_to
from engine.runner.inputs import StepInputs
from engine.spec_decode.drafter import DraftInputs


def draft_inputs(inputs: StepInputs, tokens: Tensor, history: Tensor, out: Tensor, size: int) -> DraftInputs:
    """Return a step's inputs of the drafter.

    tokens: [n], those that were sampled, in the order of `inputs.entries`. history: with these tokens.
    out: of the model, hidden states of this size and those of the layers that the drafter wants to see.
    """
    batch = inputs.batch
    assert batch is not None
    flat, index, first = history.view(-1), inputs.token_index, inputs.first_sequences
    out = out[: len(index)]  # a graph's has padding
    following = (index + 1).clamp(max=len(flat) - 1)
    return DraftInputs(
        plan=inputs.plan,
        entries=list(dict.fromkeys(inputs.entries)),
        batch=batch,
        tables=batch.block_table if first is None else batch.block_table.index_select(0, first),
        next_ids=flat[following].long(),
        last_rows=last_rows(inputs, tokens),
        hidden=out[:, :size],
        aux_hidden=out[:, size:] if out.shape[1] > size else None,
        history=history,
    )


def last_rows(inputs: StepInputs, tokens: Tensor) -> Tensor:
    """Return of each entry that samples the row that the newest token follows: the first at which another token was
    sampled than was drafted, or the last. Nothing waits for the device."""
    if inputs.drafted is None:
        return inputs.sampled_rows
    drafted = [[*inputs.plan.drafts.get(i, ()), -1] for i in dict.fromkeys(inputs.entries)]
    firsts = np.cumsum([0, *map(len, drafted)])[:-1]
    expected = copy_to([token for some in drafted for token in some], tokens.device)
    row = torch.arange(len(tokens), device=tokens.device)
    differs = torch.where(tokens == expected, len(tokens), row)
    newest = differs.flip(0).cummin(0).values.flip(0)[copy_to(firsts, tokens.device)]
    return inputs.sampled_rows[newest]

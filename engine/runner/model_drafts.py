"""Makes the inputs of a drafter with weights from a step that has been sampled."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.inputs import StepInputs
from engine.spec_decode.drafter import DraftInputs
from engine.spec_decode.verification import last_rows


def draft_inputs(
    inputs: StepInputs, tokens: Tensor, history: Tensor, out: Tensor, size: int, graphs: CudaGraphs | None
) -> DraftInputs:
    """Return the drafter's inputs for a step.

    tokens: [n] int64, the sampled tokens, in the order of `inputs.entries`.
    history: [slots, max_model_len] int32 token ids, sampled tokens included.
    out: [tokens, columns], the model's output: hidden states in the first `size` columns, then those of the layers in
    the drafter's `aux_layers`.
    graphs: those of the drafter's first pass; None if it has none.
    """
    batch = inputs.batch
    assert batch is not None
    flat, index, first = history.view(-1), inputs.token_index, inputs.first_sequences
    out = out[: len(index)]  # a graph's output has padding rows
    entries, rows = list(dict.fromkeys(inputs.entries)), inputs.sampled_rows
    if inputs.drafted is not None:
        rows = last_rows(rows, tokens, [inputs.plan.drafts.get(i, []) for i in entries])
    following = (index + 1).clamp(max=len(flat) - 1)
    replay = None
    if graphs is not None and inputs.graph is not None and inputs.graph[0] in graphs.captured:
        replay = partial(graphs.run, *inputs.graph)
    return DraftInputs(
        plan=inputs.plan,
        entries=entries,
        batch=batch,
        tables=batch.block_table if first is None else batch.block_table.index_select(0, first),
        next_ids=flat[following].long(),
        last_rows=rows,
        hidden=out[:, :size],
        aux_hidden=out[:, size:] if out.shape[1] > size else None,
        history=history,
        replay=replay,
    )

"""Samples one token per row.

sample_rows(logits, random) -> tokens [rows] int64, -1 where the largest logit is not finite; `sample_rows_plain` with
    `draw_rows_plain` is the oracle
    logits: [rows, vocab] float32
    random: groups of rows that are drawn by given random numbers, with their parameters; either all rows of a group
    have filters (top_k, top_p, min_p) or none has. All other rows take their most likely token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.model.ops import dispatch
from engine.model.ops.sampling_plain import RandomRows, draw_rows_in_parts, draw_rows_plain, sample_rows_plain

SampleRows = Callable[[Tensor, list[RandomRows]], Tensor]


def select(device: torch.device) -> SampleRows:
    """Return the fastest version, compiled."""
    fast = dispatch.module_of(torch.float32, device, cpu="sampling", gpu="sampling")
    if fast is not None:
        sample_rows: SampleRows = fast.sample_rows
        return sample_rows
    return partial(sample_rows_plain, draw_rows_in_parts if device.type == "cpu" else draw_rows_plain)

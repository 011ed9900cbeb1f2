"""Draws one token per row, using a given random number.

draw_rows(logits, best, group) -> tokens [n] int64 for the n rows of `group`, arbitrary where the best logit is not
    finite; `draw_rows_plain` is the oracle
    logits: [rows, vocab] float32; best: [rows], the largest logit of each row
    group: the rows and their parameters; either all of them have filters (top_k, top_p, min_p) or none has
"""

from __future__ import annotations

import torch

from engine.model.ops import dispatch
from engine.model.ops.sampling_plain import DrawRows, draw_rows_in_parts, draw_rows_plain


def select(device: torch.device) -> DrawRows:
    """Return the fastest version, compiled."""
    if not sorts_candidates(device):
        from engine.model.ops.gpu import sampling as gpu

        return gpu.draw_rows
    if dispatch.cpu_kernels(torch.float32, device):
        from engine.model.ops.cpu import sampling as cpu

        cpu.DRAW.compile(torch.float32)
        return cpu.draw_rows
    return draw_rows_in_parts if device.type == "cpu" else draw_rows_plain


def sorts_candidates(device: torch.device) -> bool:
    """Return whether this device sorts candidates. Rows with the same number of candidates are then sorted together."""
    return not dispatch.gpu_kernels(torch.float32, device)

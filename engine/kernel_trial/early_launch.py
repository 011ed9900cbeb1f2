"""Compares whole steps whose kernels start early with the same steps, where a kernel of torch ends before ours start.

A kernel that reads what the one before it has not written yet is right in a trial of its own, where operations of torch
end before it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.kernel_trial.steps import compute_steps, memory_of
from engine.kernel_trial.trial import Verdict, worst
from engine.model.ops.gpu import dependent_launch

MAX_DIFFERENCE = 0.005  # of a row, relative to its length: both times the same kernels compute the same


def compare_steps(runner: Any) -> Verdict:
    """Compute the steps of a trial with early launch and with other kernels between ours, kernel by kernel and in
    graphs. runner: a ModelRunner, which has no graphs afterwards."""
    verdict = Verdict("dependent_launch.begin", dependent_launch.begin)
    for in_graphs in (False, True):
        found = []
        for launches in (nullcontext(), dependent_launch.apart()):
            with launches:
                if in_graphs:
                    runner.layers.capture()
                written, steps, replays = note_steps(runner)
                runner.layers.graphs.drop()
            found.append(written)
        if in_graphs and not replays:
            break  # the model has none
        verdict.calls += steps - replays
        verdict.graphs += replays
        error = worst(list(zip(*found, strict=True)), None)
        verdict.error = max(verdict.error, error)
        if not error < MAX_DIFFERENCE and not verdict.wrong:
            where = "in replayed graphs, " if in_graphs else ""
            verdict.wrong = f"{where}a row of what steps write differs by {error:.1%}"
    return verdict


def note_steps(runner: Any) -> tuple[list[Tensor], int, int]:
    """Compute the steps of a trial. Returns the tokens [n], the logits of each step, and what the steps wrote to the KV
    cache and to states as rows; the number of steps; and how many of them were replayed graphs."""
    logits: list[Tensor] = []
    sample_rows = runner.sample_rows

    def note_and_sample(rows: Tensor, random: Any) -> Tensor:
        logits.append(rows.clone())
        sampled: Tensor = sample_rows(rows, random)
        return sampled

    runner.sample_rows = note_and_sample
    try:
        tokens, steps, replays = compute_steps(runner)
    finally:
        runner.sample_rows = sample_rows
    written = [tensor.flatten(0, -2).clone() for tensor in memory_of(runner)]
    return [torch.tensor(tokens), *logits, *written], steps, replays

"""Compares whole steps whose kernels start early with the same steps whose kernels start one after another.

A kernel that reads what the one before it has not written yet is right in a trial of its own, where operations of torch
end before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.kernel_trial.steps import trial_plans
from engine.kernel_trial.trial import Verdict, worst
from engine.model.ops.gpu import dependent_launch

MAX_DIFFERENCE = 0.005  # of a row, relative to its length: both times the same kernels compute the same


def compare_steps(config: EngineConfig, open_model: Callable[[EngineConfig], Any]) -> Verdict:
    """Compute the steps of a trial with early launch and without, kernel by kernel and in graphs. open_model: returns a
    ModelRunner, with the same weights each time."""
    verdict = Verdict("dependent_launch.begin", dependent_launch.begin)
    for eager in (True, False):
        found = []
        for launches in (nullcontext(), dependent_launch.off()):
            with launches:
                written, steps, replays = compute_steps(open_model(replace(config, enforce_eager=eager)), config)
            found.append(written)
            gc.collect()  # the runner's memory is free before the next one is opened
        verdict.calls += steps - replays
        verdict.graphs += replays
        error = worst(list(zip(*found, strict=True)), None)
        verdict.error = max(verdict.error, error)
        if not error < MAX_DIFFERENCE and not verdict.wrong:
            verdict.wrong = f"{'' if eager else 'in replayed graphs, '}a row of what steps write differs by {error:.1%}"
    return verdict


def compute_steps(runner: Any, config: EngineConfig) -> tuple[list[Tensor], int, int]:
    """Compute all steps. Returns the tokens [n], the logits of each step, and what the steps wrote to the KV cache and
    to states as rows; the number of steps; and how many of them were replayed graphs."""
    memory = [*runner.kv_caches, *(tensor for layer in runner.states.layers for tensor in layer.values())]
    for tensor in memory:
        tensor.zero_()  # what no sequence writes is compared too
    tokens: list[int] = []
    logits: list[Tensor] = []
    sample_rows = runner.sample_rows

    def note_and_sample(rows: Tensor, random: Any) -> Tensor:
        logits.append(rows.clone())
        sampled: Tensor = sample_rows(rows, random)
        return sampled

    runner.sample_rows = note_and_sample
    steps = replays = 0
    groups, vocab_size = runner.model_config.kv_groups, runner.model_config.vocab_size
    for plan in trial_plans(vocab_size, groups, runner.block_size, config.enable_lora):
        inputs = runner.prepare(plan)
        result = runner.collect(runner.launch(inputs))
        tokens += [token for sampled in result.tokens for token in sampled]
        steps, replays = steps + 1, replays + (inputs.graph is not None)
    runner.close()
    return [torch.tensor(tokens), *logits, *(tensor.flatten(0, -2) for tensor in memory)], steps, replays

"""Masks and penalties in Triton against the versions in torch, on rows of sequences that repeat tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.model.ops.gpu import logits as gpu
from engine.model.ops.logits.masks import apply_masks_plain
from engine.model.ops.logits.penalties import penalise_plain
from engine.parts.logits_processors.rank.batch_edits import RowEdits, prepare
from engine.parts.logits_processors.rank.logits_edits import LogitsEdits
from engine.wire.plan import NewSequence
from engine.wire.sampling_params import SamplingParams
from tests.engine.model.ops.gpu.paged import DEVICE

VOCAB = gpu.SEGMENT + 100
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": -0.2},
    {"repetition_penalty": 0.7, "frequency_penalty": -1.0},
]


def test_penalties_of_all_rows_are_those_of_torch():
    """One sequence has no output yet; one is longer than a program reads at a time."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 9), (7, 7), (20, gpu.POSITIONS + 50)]  # prompt, and all tokens
    rows = [
        RowEdits(
            2 * i, 3 - i, length, LogitsEdits.of(NewSequence(i, [], prompt, SamplingParams(**params), 0), frozenset())
        )
        for i, ((prompt, length), params) in enumerate(zip(sizes, PENALTIES, strict=True))
    ]
    history = torch.randint(0, 40, (4, 2000), generator=generator, dtype=torch.int32)
    history[:, ::3] += gpu.SEGMENT
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    (penalties,) = prepare(rows, VOCAB, torch.from_numpy).penalties
    expected, found = logits.clone(), logits.clone().to(DEVICE)
    penalise_plain(expected, penalties, history)
    there = replace(penalties, where=penalties.where.to(DEVICE), amounts=penalties.amounts.to(DEVICE))
    gpu.penalise(found, there, history.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-6)
    assert (expected != logits).any(1).tolist() == [True, False, False, False, True, False]


def test_masks_of_all_rows_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB + 5, generator=generator)[:, :VOCAB]
    allowed = torch.randint(0, 256, (2, -(-VOCAB // 8) + 3), generator=generator).to(torch.uint8)
    rows, expected, found = torch.tensor([3, 1]), logits.clone(), logits.clone().to(DEVICE)
    apply_masks_plain(expected, rows, allowed)
    gpu.apply_masks(found, rows.to(DEVICE), allowed.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(found[[0, 2]].cpu(), logits[[0, 2]]) and found[1].isinf().any()

"""Batches of sequences with recurrent states, for ops that see nothing else of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.batch import Batch, split
from engine.model.state import StateBatch, States, StateSpec, allocate


def state_batch(parts: Sequence[tuple[int, int, int]], saves: dict[int, tuple[int, int]] | None = None) -> Batch:
    """parts: slot, position of the first token and number of tokens of each sequence. saves: border and slot, by the
    index of a sequence."""
    counts, kv_lens = [count for _, _, count in parts], [start + count for _, start, count in parts]
    saves = saves or {}
    none: Any = torch.empty(0)
    single, chunks = split(counts, kv_lens)
    return Batch(
        positions=none, slot_mapping=none, block_table=none, kv_cache=none, single=single, chunks=chunks,
        query_start=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32),
        states=StateBatch(
            layers=[],
            slots=torch.tensor([slot for slot, _, _ in parts], dtype=torch.int32),
            save_at=torch.tensor([saves.get(i, (-1, 0))[0] for i in range(len(parts))], dtype=torch.int32),
            save_slots=torch.tensor([saves.get(i, (-1, 0))[1] for i in range(len(parts))], dtype=torch.int32),
        ),
    )  # fmt: skip


def garbage(spec: StateSpec, running: int, kept: int = 0) -> States:
    """Slots full of what nobody may read."""
    _, (states,) = allocate([spec], running, kept, "cpu")
    for tensor in states.values():
        tensor.fill_(torch.nan)
    return states


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))

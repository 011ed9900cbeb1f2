"""What layers with a recurrent state keep of a sequence, and how a step finds it.

A state is kept at a border: a position that is a multiple of CHUNK. The tokens from there on are rows that are kept
until the next border, where all of them move the state at once. So a token has the same bits whether a prompt computes
it or it is decoded, a copy of a state at a border is all that a prefix cache needs, and drafts that were
refused leave nothing behind: their rows are written again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.model.config_parts.recurrent import RecurrentConfig
from engine.wire.plan import StateRestore, StateSave

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.device import StagedCopy

logger = logging.getLogger(__name__)

CHUNK = 64
RING = 16
"""Inputs of a convolution that are kept, that of position p at p % RING: those that it reads, and as many as drafts may
have overwritten."""

ALIGNED = 64
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
Shape = tuple[tuple[int, ...], str]
States = dict[str, "Tensor"]
"""The tensors of one layer by name, [slots, *shape], whose slots need not lie side by side. A slot needs no clearing: a
sequence's position says what it has written."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The tensors that one layer has for each sequence on this rank, by name."""

    kept: dict[str, Shape]
    """Those that a state at a border consists of: `state`, and `conv` with RING inputs."""
    rows: dict[str, Shape] = field(default_factory=dict)
    """Those with the CHUNK rows since the last border, which only a sequence that is computed has."""

    @property
    def kept_bytes(self) -> int:
        """Those of a state at a border, with padding: each tensor begins at a multiple of ALIGNED bytes."""
        return sum(aligned(num_bytes(*tensor)) for tensor in self.kept.values())

    @property
    def row_bytes(self) -> int:
        return sum(num_bytes(*tensor) for tensor in self.rows.values())


def allocate(
    specs: list[StateSpec], running: int, kept: int, device: torch.device | str
) -> tuple[Tensor, list[States]]:
    """Slots for `running` sequences, and for `kept` states behind them. Returns [running + kept, bytes] uint8, in which
    the states of all layers lie side by side, so that a copy of one sequence's is one piece; and the tensors of each
    layer, which are views of it, but for the rows."""
    import torch

    memory = torch.empty(running + kept, sum(spec.kept_bytes for spec in specs), dtype=torch.uint8, device=device)
    layers, start = [], 0
    for spec in specs:
        tensors: States = {}
        for name, (shape, dtype) in spec.kept.items():
            size = num_bytes(shape, dtype)
            tensors[name] = memory[:, start : start + size].view(getattr(torch, dtype)).unflatten(1, shape)
            start += aligned(size)
        for name, (shape, dtype) in spec.rows.items():
            tensors[name] = torch.empty(running, *shape, dtype=getattr(torch, dtype), device=device)
        layers.append(tensors)
    return memory, layers


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype]


def state_specs(recurrent: RecurrentConfig | None, dtype: str, tp_size: int = 1) -> list[StateSpec]:
    """What each layer with a state keeps on one rank, in the order of the layers. dtype: of the model.

    Raises ConfigError when heads and ranks do not divide."""
    if recurrent is None:
        return []
    kept: dict[str, Shape] = {"conv": ((RING, recurrent.channels_per_rank(tp_size)), dtype)}
    rows: dict[str, Shape] = {}
    if recurrent.heads:
        heads, key_heads = recurrent.heads_per_rank(tp_size)
        kept["state"] = (heads, recurrent.key_dim, recurrent.value_dim), "float32"
        rows = {
            "keys": ((key_heads, CHUNK, recurrent.key_dim), "float32"),
            "values": ((heads, CHUNK, recurrent.value_dim), "float32"),
            "decays": ((heads, CHUNK, recurrent.decay_dim), "float32"),
        }
    return [StateSpec(kept, rows)] * len(recurrent.layers)


@dataclass(slots=True)
class StateBatch:
    """The recurrent part of a Batch."""

    layers: list[States]
    """One per layer that has a state, in the order of the layers."""
    slots: Tensor
    """[seqs] int32, where each sequence's state is."""
    save_at: Tensor
    """[seqs] int32, a border that this step reaches, where the state is also written to another slot; -1 for none."""
    save_slots: Tensor
    """[seqs] int32, that slot."""
    plans: dict[object, Any] = field(default_factory=dict)
    """What ops make of all this, once for all layers."""


class StateCache:
    """The states of the sequences that run, each in the slot that it has in the runner, and snapshots behind them."""

    def __init__(self, specs: list[StateSpec], slots: int, num_snapshots: int, device: torch.device):
        """specs: of the layers with a state, if there are any."""
        self.slots, self.num_snapshots = slots, num_snapshots
        self._memory, self.layers = allocate(specs, slots, num_snapshots, device)
        if specs:
            kept = sum(spec.kept_bytes for spec in specs)
            running, size = slots * (kept + sum(spec.row_bytes for spec in specs)), num_snapshots * kept
            logger.info(
                "states of recurrent layers: %d sequences, %.2f GiB; %d snapshots, %.2f GiB, of %.2f MiB each",
                slots, running / 2**30, num_snapshots, size / 2**30, kept / 2**20,
            )  # fmt: skip

    @property
    def snapshots(self) -> Tensor:
        """[snapshots, 1, 1, 1, 1, bytes] uint8, which a KV transport takes for blocks."""
        return self._memory[self.slots :, None, None, None, None]

    def restore(self, restored: list[StateRestore]) -> None:
        """Let sequences resume from snapshots."""
        for slot, snapshot in restored:
            self._memory[slot].copy_(self._memory[self.slots + snapshot])

    def batch(self, slots: np.ndarray, staged: StagedCopy, saved: Sequence[StateSave] = ()) -> StateBatch | None:
        """The states of a step's sequences. slots: [seqs] int64. saved: by this step, at most one for each."""
        if not self.layers:
            return None
        save_at, save_slots = np.full((2, len(slots)), -1, dtype=np.int32)
        for slot, position, snapshot in saved:
            save_at[slots == slot], save_slots[slots == slot] = position, self.slots + snapshot
        return StateBatch(self.layers, staged.add(slots.astype(np.int32)), staged.add(save_at), staged.add(save_slots))


def max_drafts(position: int, kernel: int) -> int:
    """Return how many drafts may follow the token at `position` in a step: none of them may move the state, or
    overwrite an input that a convolution over `kernel` tokens still reads."""
    return min((CHUNK - 2 - position) % CHUNK, RING - kernel)

"""The states of recurrent layers: the tensors kept for each sequence, and where a step finds them.

A state stands at a border, a position that is a multiple of CHUNK. Tokens after the border are kept as rows until the
next border, where all of them are put into the state at once. So a token has the same bits whether it belongs to a
prompt or is decoded. A prefix cache needs only a copy of the state at a border. And rejected drafts do no harm, since
their rows are overwritten.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.model.config_parts.recurrent import RecurrentConfig
from engine.wire.parts.states import NO_STATES, StateSave, StateStep
from engine.wire.plan import StepPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.devices.device import StagedCopy
    from engine.model.batch import Batch

logger = logging.getLogger(__name__)

CHUNK = 32
RING = 16
"""Convolution inputs that are kept, the one of position p at index p % RING. This is more than the convolution reads,
so rejected drafts cannot overwrite an input that it still needs."""

ALIGNED = 64
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
Shape = tuple[tuple[int, ...], str]
States = dict[str, "Tensor"]
"""The tensors of one layer by name, [slots, *shape], with any stride between slots. A slot need not be cleared for a
new sequence: the sequence's position shows which values it has written."""
"""What a step changes: tensors, the indices that change, and the values from before."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The tensors that one recurrent layer has on this rank for each sequence, by name."""

    kept: dict[str, Shape]
    """The tensors of a state at a border: `state`, and `conv` with RING inputs."""
    rows: dict[str, Shape] = field(default_factory=dict)
    """Tensors with the up to CHUNK rows since the last border. Running sequences have them, snapshots do not."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the `kept` tensors with padding: each begins at a multiple of ALIGNED bytes."""
        return sum(aligned(num_bytes(*tensor)) for tensor in self.kept.values())

    @property
    def row_bytes(self) -> int:
        return sum(num_bytes(*tensor) for tensor in self.rows.values())


def allocate(
    specs: list[StateSpec], running: int, kept: int, device: torch.device | str
) -> tuple[Tensor, list[States]]:
    """Allocate slots for `running` sequences, followed by slots for `kept` snapshots.

    Returns their memory, [running + kept, bytes] uint8, in which the states of all layers are adjacent, so that copying
    a slot is one copy; and the tensors of each layer. `kept` tensors are views of the memory, `rows` are separate.
    """
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
    """Return the spec of each recurrent layer on one rank, in the order of layers. dtype: the model's dtype.

    Raises ConfigError if heads cannot be split over the ranks.
    """
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
    """One per recurrent layer, in the order of layers."""
    slots: Tensor
    """[seqs] int32, the slot of each sequence's state."""
    save_at: Tensor
    """[seqs] int32, a border reached in this step at which a snapshot is taken; -1 for none."""
    save_slots: Tensor
    """[seqs] int32, the slot of that snapshot."""
    plans: dict[object, Any] = field(default_factory=dict)
    """What ops derive from the fields above, once for all layers."""


class StateCache:
    """The states of running sequences, in the runner's slots, followed by the slots of snapshots."""

    def __init__(self, specs: list[StateSpec], slots: int, num_snapshots: int, device: torch.device):
        """specs: one per recurrent layer, possibly none."""
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
        """Snapshots as a KV transport sees them, each as one block: [snapshots, layers, 1, 1, 1, bytes of a layer]
        uint8."""
        return self._memory[self.slots :].unflatten(1, (max(1, len(self.layers)), -1))[:, :, None, None, None]

    def restore(self, plan: StepPlan) -> None:
        """Copy snapshots into the slots of sequences that resume from them."""
        for slot, snapshot in (plan.record(StateStep) or NO_STATES).restored:
            self._memory[slot].copy_(self._memory[self.slots + snapshot])

    def batch(self, slots: np.ndarray, staged: StagedCopy, states: StateStep = NO_STATES) -> StateBatch | None:
        """Return the states of a step's sequences; None for a model without recurrent layers. slots: [seqs] int64."""
        if not self.layers:
            return None
        save_at, save_slots = self.saves(slots, states.saved)
        return StateBatch(self.layers, staged.add(slots.astype(np.int32)), staged.add(save_at), staged.add(save_slots))

    def saves(self, slots: np.ndarray, saved: Sequence[StateSave]) -> np.ndarray:
        """Return [2, seqs] int32: `save_at` and `save_slots` of a StateBatch."""
        columns = np.full((2, len(slots)), -1, dtype=np.int32)
        for slot, position, snapshot in saved:
            columns[:, slots == slot] = [[position], [self.slots + snapshot]]
        return columns


def max_drafts(position: int, kernel: int) -> int:
    """Return how many drafts can follow the token at `position` in a step. They must neither reach the next border nor
    overwrite inputs that a convolution over `kernel` tokens still reads."""
    return min((CHUNK - 2 - position) % CHUNK, RING - kernel)


@dataclass(frozen=True, slots=True)
class DraftBound:
    """`max_drafts` by the position alone."""

    kernel: int

    def __call__(self, position: int) -> int:
        return max_drafts(position, self.kernel)


class StateRows(NamedTuple):
    """On the host: the rows that a step computes for one sequence with a recurrent state."""

    first: int  #: first row
    last: int  #: row after the last
    start: int  #: position of the first row in the sequence
    slot: int
    save_at: int
    save_slot: int


def state_rows(batch: Batch) -> list[StateRows]:
    """Return the rows of each sequence, without padding."""
    states = batch.states
    assert states is not None
    starts, kv_lens = batch.query_start.tolist(), batch.kv_len.tolist()
    slots = zip(states.slots.tolist(), states.save_at.tolist(), states.save_slots.tolist(), strict=True)
    return [
        StateRows(first, last, kv_len - last + first, *seq)
        for first, last, kv_len, seq in zip(starts, starts[1:], kv_lens, slots, strict=False)
        if kv_len
    ]

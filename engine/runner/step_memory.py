"""What a rank keeps of sequences from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.model.state import StateCache


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory that steps read and write. Its contents change between steps; its addresses do not."""

    kv_caches: list[Tensor]  #: one per KV cache group
    kv_scales: list[Tensor | None]  #: one per KV cache group; None without FP8
    states: StateCache
    history: Tensor  #: [slots, max_model_len] int32, the tokens of each sequence

    @property
    def blocks(self) -> list[Tensor]:
        """The tensors whose blocks other engines and tiers read: KV caches, then snapshots of recurrent states."""
        return [*self.kv_caches, *([self.states.snapshots] if self.states.num_snapshots else [])]

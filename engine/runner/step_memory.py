"""What a rank keeps of sequences from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory that steps read and write. Its contents change between steps; its addresses do not."""

    kv_caches: list[Tensor]  #: one per KV cache group
    kv_scales: list[Tensor | None]  #: one per KV cache group; None without FP8
    history: Tensor  #: [slots, max_model_len] int32, the tokens of each sequence
    of: dict[str, Any] = field(default_factory=dict)
    """What parts keep, by their names."""
    more_blocks: list[Tensor] = field(default_factory=list)
    """Of what parts keep, that which other engines and tiers read block by block."""
    more_block_bytes: list[int] = field(default_factory=list)
    """Bytes of one of each of `more_blocks` on a rank of each stage, all stages together."""

    @property
    def blocks(self) -> list[Tensor]:
        """The tensors whose blocks other engines and tiers read."""
        return [*self.kv_caches, *self.more_blocks]

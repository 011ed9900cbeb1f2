"""How a model is divided over its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.distributed.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What layers know of the ranks that share them, and of what each rank computes. One rank has everything."""

    ranks: TPGroup = field(default_factory=TPGroup.single)
    fixed_order: bool = False  #: whether sums have the same bits with any number of ranks
    parts: int = 1  #: addends of each sum that every rank computes
    vocab_multiple: int = 1  #: divisor of the number of vocabulary rows on a rank

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

"""How a model with experts is divided over its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.part_group import PartGroup
from engine.distributed.shard_plan import ShardPlan
from engine.distributed.tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class ExpertShardPlan(ShardPlan):
    """A plan in which ranks may have whole experts, instead of a slice of every expert."""

    expert_parallel: bool = False  #: whether each rank has some whole experts
    redundant_experts: int | None = None  #: slots of a layer beyond one for each expert; None if experts do not move
    expert_exchange: ExpertExchange | None = None  #: spreads the experts over the ranks of several engines

    @classmethod
    def of(cls, config: EngineConfig, ranks: TPGroup) -> ExpertShardPlan:
        """Return the plan of a rank of an engine with these options."""
        return cls(
            ranks,
            expert_parallel=config.enable_expert_parallel,
            redundant_experts=config.redundant_experts,
            expert_exchange=exchange_of(ranks),
        )


def exchange_of(ranks: TPGroup) -> ExpertExchange | None:
    """Return the exchange of rows with the ranks of other engines that share experts; None if there are none."""
    return ranks.expert_exchange if isinstance(ranks, PartGroup) else None

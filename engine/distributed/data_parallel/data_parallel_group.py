"""Data-parallel engines: several engines, each with its own requests and KV, that share the experts of one model.

Rank r of the group of all ranks is rank r % size of engine r // size. This group exchanges rows of mixture layers
(exchange/), and wakes engines that have nothing to compute. For everything else an engine is alone, with its own
tensor-parallel group.

Engines may have pipeline stages. Then the ranks of the same stage in all engines share that stage's experts, and step
together. They never wait for another stage, except for the one before it.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.distributed.data_parallel.waves import Waves
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.part_group import CONNECT_TIMEOUT_S, PartGroup
from engine.distributed.tp_group import LOADING_TIMEOUT_S, ConnectedGroup, TPGroup


class DataParallelGroup(PartGroup):
    """The ranks of one of several engines. Its start and its end are those of all engines."""

    all_engines: ConnectedGroup
    expert_ranks: ConnectedGroup

    def __init__(self, all_engines: ConnectedGroup, size: int = 1, stages: int = 1):
        """Connect the ranks of each engine, and the engines. size: ranks of an engine, of all its stages. Every rank
        has to call this at the same time. Raises StartupError."""
        super().__init__(all_engines, size)
        self.engine, self._width, self.has_stages = self.number, size // stages, stages > 1
        self._stage, self._place = divmod(self.rank, self._width)
        self.all_engines = self.expert_ranks = all_engines
        with self.starting():
            self.connect_own(f"engine {self.engine}", collectives=not self.has_stages)
            if self.has_stages:
                engines, width = all_engines.size // size, self._width
                rank, ranks = self.engine * width + self._place, engines * width
                self.expert_ranks = all_engines.part(f"experts of stage {self._stage}", rank, ranks)
                self.expert_ranks.join(CONNECT_TIMEOUT_S)
            hosts = self.expert_ranks.on_hosts(CONNECT_TIMEOUT_S)
            self.expert_exchange: ExpertExchange = ExpertExchange(self.expert_ranks, hosts, self._width)
            self.waves = Waves(self.expert_ranks)
        self.local_size = self.own.local_size

    @property
    def leads(self) -> bool:
        """Whether the other ranks of its stage, or of its engine, launch the steps that this one launches."""
        return self._place == 0

    def exchange(self, value: str, timeout_s: float = LOADING_TIMEOUT_S) -> list[str]:
        return self.own.exchange(value, timeout_s)

    def close(self) -> None:
        self.waves.close()
        super().close()


def engine_group(config: EngineConfig, ranks: TPGroup) -> TPGroup:
    """Return the ranks of this rank's engine. ranks: all ranks that have joined. Every rank has to call this at the
    same time. Raises StartupError."""
    if config.data_parallel_size == 1:
        return ranks
    assert isinstance(ranks, ConnectedGroup)
    return DataParallelGroup(ranks, config.num_ranks, config.pipeline_parallel_size)

"""Measures the load of experts that several engines share, and moves them between the ranks of all engines.

No plan reaches the ranks of all engines. But they take steps together, and each step begins with an exchange, in which
every rank tells its state. So all ranks know the same states before the same step, and each decides by itself what rank
0 of a single engine decides for all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.eplb.rank_experts import IDLE, RankExperts
from engine.eplb.windows import Windows
from engine.model.layers.moe import Experts
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder, ExpertStats

logger = logging.getLogger(__name__)

MOVING, ARRIVED, FAILED = 1, 2, 3  # states of a rank, besides IDLE


class SharedRankExperts(RankExperts):
    """The experts of one rank. Every rank counts the tokens of its own engine; once per window, they are added up."""

    def __init__(self, layers: dict[int, Experts], ranks: TPGroup, device: Device, config: EngineConfig):
        """ranks: of all engines. The other arguments are those of RankExperts."""
        eplb = config.eplb if config.enable_eplb else None
        super().__init__(layers, ranks, device, config.max_num_batched_tokens, eplb)
        self._config, self._windows, self._moves = config, Windows(config.eplb), config.enable_eplb
        self._state, self._stopped = IDLE, False
        self._load: ExpertStats | None = None

    @property
    def stats(self) -> list[ExpertStats]:
        """The newest load; on the first rank of all engines only."""
        return [] if self._load is None else [replace(self._load, stopped=self._stopped)]

    def tell(self) -> int:
        """Return the state of this rank, which all ranks have to know for `turn`."""
        for answer in super().answers():
            if answer.load is not None:
                self._load = answer.load
            elif answer.failed:
                logger.error("experts move no more on any rank: %s", answer.failed)
                self._state = FAILED
            elif self._state != FAILED:
                self._state = ARRIVED if answer.arrived else IDLE
        return self._state

    def turn(self, states: Sequence[int]) -> None:
        """Do what all ranks do before a step. states: of all ranks."""
        stop = FAILED in states and not self._stopped
        commit = all(state == ARRIVED for state in states)
        measure, move = self._windows.next(self._moves and all(state == IDLE for state in states))
        if stop:
            self._stopped, self._state = True, FAILED
        elif commit or move:
            self._state = MOVING
        self._obey(ExpertOrder(measure, move, commit, stop))

    def _counted(self) -> Tensor:
        of_ranks = self._tp.all_gather(self._counts.flatten()).view(self._tp.size, *self._counts.shape)
        return of_ranks[:: self._config.tensor_parallel_size].sum(0)  # all ranks of an engine have its tokens

    def answers(self) -> list[ExpertAnswer]:
        """Return nothing: there is no rank 0 to tell."""
        return []

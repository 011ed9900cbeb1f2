"""Decides, on rank 0, when the load of experts is measured and when experts move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.config import EPLBConfig
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.eplb.rank_experts import RankExperts
from engine.wire.messages import ExpertStats
from engine.wire.plan import ExpertAnswer, ExpertOrder, StepPlan

if TYPE_CHECKING:  # it needs pyzmq
    from engine.distributed.plan_broadcast import PlanBroadcaster


class GroupExperts:
    """The experts of all ranks of an engine. They move layer by layer: when all ranks have what they need for the next
    placement of a layer, a plan lets them use it, all at the same step."""

    def __init__(
        self,
        experts: RankExperts,
        broadcaster: PlanBroadcaster | NoBroadcaster,
        config: EPLBConfig,
        *,
        stages: int,
        ranks: int,
    ):
        """experts: of this rank. ranks: of all stages; 0 if experts do not move."""
        self._experts, self._broadcaster, self._config = experts, broadcaster, config
        self._stages, self._ranks = stages, ranks
        self._steps, self._moves_at = 0, config.window_size
        self._loads = 0  # that have not been reported yet
        self._moving = self._arrived = 0  # ranks
        self._stats: dict[int, ExpertStats] = {}  # by stage

    @property
    def stats(self) -> list[ExpertStats]:
        return [stats for _, stats in sorted(self._stats.items())]

    def mark(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the next step, with what ranks have to do before it."""
        if self._loads or self._moving:
            self._take_answers()
        measure = self._steps > 0 and self._steps % self._config.window_size == 0
        move = measure and self._ranks > 0 and not self._moving and self._steps >= self._moves_at
        commit = 0 < self._moving == self._arrived
        self._steps += 1
        if measure:
            self._loads += self._stages
        if move:
            self._moving, self._moves_at = self._ranks, self._steps - 1 + self._config.step_interval
        if commit:
            self._arrived = 0
        return replace(plan, experts=ExpertOrder(measure, move, commit)) if measure or commit else plan

    def _take_answers(self) -> None:
        for answer in [*self._experts.answers(), *self._broadcaster.take_answers(ExpertAnswer)]:
            if answer.load is not None:
                self._loads -= 1
                self._stats[answer.load.stage] = answer.load
            self._arrived += answer.arrived
            self._moving -= answer.done


class NoMoves(GroupExperts):
    """Stand-in for GroupExperts where ranks do not share whole experts."""

    def __init__(self) -> None:
        self._stats = {}

    def mark(self, plan: StepPlan) -> StepPlan:
        return plan

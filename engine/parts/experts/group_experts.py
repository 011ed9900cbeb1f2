"""Decides, on rank 0, when the load of experts is measured and when experts move."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.core.mail.ranks import PlanMarks
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.eplb.rank_experts import RankExperts
from engine.eplb.windows import Windows
from engine.options.experts import EPLBConfig
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder, ExpertReport, ExpertStats
from engine.wire.plan import StepPlan

if TYPE_CHECKING:  # it needs pyzmq
    from engine.distributed.plan_broadcast import PlanBroadcaster


logger = logging.getLogger(__name__)


class GroupExperts(PlanMarks):
    """The experts of all ranks of an engine. They move layer by layer: when all ranks have what they need for the next
    placement of a layer, a plan lets them use it, all at the same step. If a rank fails, a plan tells all ranks that
    nothing moves any more."""

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
        self._experts, self._broadcaster, self._windows = experts, broadcaster, Windows(config)
        self._stages, self._ranks = stages, ranks
        self._loads = 0  # that have not been reported yet
        self._moving = self._arrived = 0  # ranks
        self._failed = False
        self._stats: dict[int, ExpertStats] = {}  # by stage

    def report(self) -> ExpertReport:
        """Return the load of the experts."""
        return ExpertReport([replace(stats, stopped=self._failed) for _, stats in sorted(self._stats.items())])

    def mark(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the next step, with what ranks have to do before it."""
        if self._loads or self._moving:
            self._take_answers()
        stop = self._failed and self._ranks > 0
        if stop:
            self._ranks = self._moving = 0
        commit = 0 < self._moving == self._arrived
        measure, move = self._windows.next(self._ranks > 0 and not self._moving)
        if measure:
            self._loads += self._stages
        if move:
            self._moving = self._ranks
        if commit:
            self._arrived = 0
        order = ExpertOrder(measure, move, commit, stop)
        return replace(plan, parts=plan.parts | {order.part: order}) if order != ExpertOrder() else plan

    def _take_answers(self) -> None:
        for answer in [*self._experts.answers(), *self._broadcaster.take_answers(ExpertAnswer)]:
            if answer.load is not None:
                self._loads -= 1
                self._stats[answer.load.stage] = answer.load
            self._arrived += answer.arrived
            self._moving -= answer.done
            if answer.failed and not self._failed:
                self._failed = True
                logger.error("experts move no more on any rank: %s", answer.failed)

"""One rank of several engines that share experts, as what launches its steps sees it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.eplb.rank_experts import NoExperts
from engine.model.models.llama import Model
from engine.model.state import StateCache
from engine.runner.graphs.cuda_graphs import NoGraphs
from engine.runner.graphs.shared_graphs import SharedGraphs
from engine.runner.launcher import StepRunner
from engine.runner.rank_setup import RankSetup


@dataclass(frozen=True, slots=True)
class SharedRank:
    runner: StepRunner
    setup: RankSetup
    model: Model
    states: StateCache | None
    graphs: SharedGraphs | NoGraphs
    experts: NoExperts

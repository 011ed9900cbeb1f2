"""Makes what moves the experts of an engine between its ranks."""

from __future__ import annotations

from engine.eplb.rank_experts import RankExperts
from engine.eplb.shared_rank_experts import SharedRankExperts
from engine.parts.experts.group_experts import GroupExperts
from engine.parts.experts.rank.experts import ExpertLayers
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config, rank = setup.loaded.config, setup.loaded.runner.parts.get(ExpertLayers)
    if rank is None or not isinstance(rank.rank, RankExperts) or isinstance(rank.rank, SharedRankExperts):
        return Made()  # ranks share no whole experts, or those of several engines decide themselves when they move
    ranks = config.num_ranks if config.enable_eplb else 0
    stages = config.pipeline_parallel_size
    return Made(marks=[GroupExperts(rank.rank, setup.broadcaster, config.eplb, stages=stages, ranks=ranks)])

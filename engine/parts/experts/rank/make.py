"""Makes the experts of a rank."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model.expert_split import exchange_of
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup


def make(setup: RankSetup) -> RankPart | None:
    if not setup.config.of(EngineConfig).enable_expert_parallel:
        return None
    if exchange_of(setup.tp) is None:
        from engine.parts.experts.rank.experts import ExpertLayers

        return ExpertLayers(setup)
    from engine.parts.experts.rank.shared_experts import SharedExpertLayers  # it needs pyzmq

    return SharedExpertLayers(setup)

"""Experts that several ranks share: their load, and moves between the ranks (engine/eplb/)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.eplb.layer_slots import add_slots
from engine.eplb.open_experts import open_experts
from engine.eplb.rank_experts import NoExperts
from engine.errors import ConfigError
from engine.model.expert_split import choose_exchange, exchange_of
from engine.model.layers import moe
from engine.model.models.llama import Model
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import Forward
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder


class ExpertLayers(RankPart):
    name = "experts"

    def __init__(self, setup: RankSetup):
        self.setup = setup
        self.rank = NoExperts()
        if (exchange := exchange_of(setup.tp)) is not None:
            choose_exchange(setup.config.of(EngineConfig), exchange, on_gpu=setup.torch_device.type == "cuda")

    def extend(self, model: Model) -> None:
        """Make room for redundant experts. Raises ConfigError for a model without experts, as transformers' own code
        may be."""
        setup = self.setup
        if setup.model.transformers and not any(isinstance(layer, moe.Experts) for layer in model.modules()):
            limit = f"left out for {setup.model.architecture}, which has no experts"
            raise ConfigError("enable_expert_parallel", True, limit)
        if setup.config.of(EngineConfig).redundant_experts is not None:
            add_slots(model)

    def attach(self, model: Model) -> None:
        """Begin to count. Steps before may have more tokens than there is room for."""
        self.rank = open_experts(self.setup.config.of(EngineConfig), model, self.setup.tp, self.setup.device)

    def start(self, run: Run, runner: LayerRunner) -> None:
        self.rank.reset()

    def before(self, step: Forward) -> None:
        self.rank.begin(step.inputs.plan.record(ExpertOrder), step.inputs.plan.num_tokens)

    def answers(self) -> Iterable[ExpertAnswer]:
        return self.rank.answers()

    def close(self) -> None:
        self.rank.close()

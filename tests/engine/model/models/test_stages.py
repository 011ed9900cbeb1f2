"""Every family over pipeline stages of one layer each: the bits of the whole model, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import load_weights, pack_weights
from engine.model.models.llama import Model
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from engine.model.stage import check_stages, config_of, nth_stage
from engine.options.handoff import HandoffConfig
from tests.batches import ByHand, load_by_hand
from tests.models import FAMILIES, HYBRIDS, make_model, with_slow

REFUSED = {"gemma3n", "gemma4", "gemma4_moe", "gemma4_unified", "deepseek_v32", "glm_moe_dsa", "longcat_flash"}


class Part(nn.Module):
    """One stage. Takes the hidden states of the stage before from `x`; has them in place of logits, before the last."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.x: Tensor | None = None

    def forward(self, ids: Tensor, batch) -> Tensor:
        return self.model(ids, batch) if self.x is None else self.model.run_layers(self.x, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if self.model.lm_head is None else self.model.logits(hidden)


def load_stage(folder, cfg: ModelConfig, stage: int) -> ByHand:
    part = config_of(nth_stage(stage, [1] * cfg.num_layers, cfg), cfg)
    model = build_model(part, ShardPlan(), torch.bfloat16, "cpu")
    load_weights(model, folder, TPGroup.single())
    pack_weights(model)
    return ByHand(Part(model), part, tp=ShardPlan())


@pytest.mark.parametrize("family", with_slow([*FAMILIES, *HYBRIDS]))
def test_stages_of_one_layer_give_the_bits_of_the_whole_model_in_every_family_or_are_refused(tmp_path, family):
    folder = make_model(tmp_path, family)
    cfg = ModelConfig.from_folder(folder)
    config = EngineConfig(model=str(folder), pipeline_parallel_size=cfg.num_layers)
    if family in REFUSED:
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            check_stages(config, cfg)
        return
    check_stages(config, cfg)
    whole = load_by_hand(folder, dtype=torch.bfloat16)
    parts = [load_stage(folder, cfg, stage) for stage in range(cfg.num_layers)]
    for tokens in ({0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}):
        x = None
        for part in parts:
            part.model.x = x
            x = part.step(tokens)
        assert torch.equal(x, whole.step(tokens))


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("handoff", {"handoff": HandoffConfig(role="encode")}),
        ("encode", {"encode": HandoffConfig(role="decode")}),
    ],
)
def test_options_that_stages_do_not_support_are_refused_by_name(tmp_path, option, options):
    folder = make_model(tmp_path, "llama")
    config = EngineConfig(model=str(folder), pipeline_parallel_size=2, **options)
    with pytest.raises(ConfigError, match=f"{option} must be left out, because pipeline_parallel_size"):
        check_stages(config, ModelConfig.from_folder(folder))

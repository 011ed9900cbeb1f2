"""Models that transformers' own code computes, split over two ranks."""

from __future__ import annotations

import pytest
import torch

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.families.transformers_family import ONE_RANK, TRANSFORMERS
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from tests.models import with_slow
from tests.products import few
from tests.ranks import check_ranks
from tests.transformers_models import TEXT_PARTS, make_transformers_model

# One for each way in which heads meet the ranks: split, computed whole by each, experts, a scaled tied embedding.
QUICK = {"Glm4ForCausalLM", "AfmoeForCausalLM", "MiniMaxM2ForCausalLM", "VaultGemmaForCausalLM"}
# in transformers' classes for text parts: with windows, of Llama's code, with experts, and with rotary sections
QUICK_PARTS = {
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}
SPLIT = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TRANSFORMERS if name not in ONE_RANK
]


@pytest.mark.parametrize("name", few(2, SPLIT))
def test_every_rank_has_the_logits_of_the_unsharded_model(tmp_path, name):
    check_ranks(make_transformers_model(tmp_path, name), 2)


@pytest.mark.parametrize("name", with_slow(TEXT_PARTS, sorted(TEXT_PARTS.keys() - QUICK_PARTS)))
def test_every_rank_has_the_logits_of_the_unsharded_text_part(tmp_path, name):
    check_ranks(make_transformers_model(tmp_path, name), 2)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", *with_slow(["OlmoeForCausalLM"], ["OlmoeForCausalLM"])])
def test_ranks_may_have_whole_experts(tmp_path, name):
    check_ranks(make_transformers_model(tmp_path, name), 2, expert_parallel=True)


@pytest.mark.parametrize("name", ["Glm4ForCausalLM", pytest.param("Dots1ForCausalLM", marks=pytest.mark.slow)])
def test_with_more_ranks_than_kv_heads_several_ranks_hold_the_same_head(tmp_path, name):
    check_ranks(make_transformers_model(tmp_path, name), 4)


@pytest.mark.parametrize("name", sorted(ONE_RANK))
def test_a_model_without_a_plan_is_not_split(tmp_path, name):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path, name))
    with pytest.raises(ConfigError, match=f"tensor_parallel_size must be 1: transformers has no plan to split {name}"):
        build_model(cfg, ShardPlan(TPGroup(0, 2)), torch.float32, "cpu")

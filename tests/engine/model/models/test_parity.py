"""Our models against transformers: the same logits, and the same greedy tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.distributed.tp_group import TPGroup
from engine.model.config import ModelConfig
from engine.model.loader import load_weights, pack_weights
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from tests.batches import ByHand
from tests.models import FAMILIES, make_model, with_slow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}
DENSE_AND_SPARSE = {"num_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_own_factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_no_grouping": ("llama", {"num_key_value_heads": 4}),
    "mistral_without_window": ("mistral", {"sliding_window": None}),
    "qwen2_windowed_from_layer_1": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "llama_foreign_keys": ("llama", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "mistral_foreign_keys": ("mistral", {"attention_bias": True, "mlp_bias": True}),
    "qwen2_foreign_keys": ("qwen2", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_biases": ("qwen3", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe_windowed": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "gemma3_biases": ("gemma3", {"attention_bias": True}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3_untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3_moe_alternating": ("qwen3_moe", DENSE_AND_SPARSE),
    # shorter than the original context: the short factors
    "phi3_longrope": (
        "phi3",
        {"original_max_position_embeddings": 512, "rope_parameters": LONGROPE},
    ),
    "gemma2_without_caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "mixtral_windowed": ("mixtral", {"sliding_window": 8}),
    "glm4_moe_without_norms_and_groups": ("glm4_moe", {"use_qk_norm": False, "n_group": 1, "topk_group": 1}),
    "gpt_oss_all_windowed": ("gpt_oss", {"layer_types": ["sliding_attention"] * 3}),
    "gemma3_pattern": ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
}


# full attention, windows, capped logits, experts with sinks, latents, and latents that choose what they see
EACH_KIND = {"llama", "gemma3", "gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32"}


class Pair:
    """One model twice: transformers' and ours."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None):
        self.cfg = ModelConfig.from_folder(folder, max_model_len=max_model_len)
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.reference.generation_config.eos_token_id = None  # so that every generation is as long as asked for
        self.ours = build_model(self.cfg, ShardPlan(), dtype, "cpu")
        load_weights(self.ours, folder, TPGroup.single())
        pack_weights(self.ours)

    def by_hand(self) -> ByHand:
        return ByHand(self.ours, self.cfg, tp=ShardPlan())

    def prompt(self, length: int, seed: int) -> list[int]:
        return torch.randint(self.cfg.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    @cache
    def make(variant: str) -> Pair:
        family, overrides = VARIANTS[variant]
        return Pair(make_model(tmp_path_factory.mktemp(variant), family, **overrides))

    return make


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_of_a_whole_prompt_equal_those_of_transformers(pair_of, variant):
    pair = pair_of(variant)
    prompt = pair.prompt(45, seed=1)
    expected = pair.reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(pair.by_hand().step({0: prompt}), expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_sequence_past_the_original_context_turns_by_the_long_factors(tmp_path):
    pair = Pair(
        make_model(tmp_path, "phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE), max_model_len=64
    )
    prompt = pair.prompt(45, seed=1)
    expected = pair.reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(pair.by_hand().step({0: prompt}), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", with_slow(FAMILIES, FAMILIES.keys() - EACH_KIND))
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path, family):
    total = their_total = 0.0
    for seed in range(2, 6 if "moe" in family else 3):  # a router that hesitates may choose another expert
        folder = make_model(tmp_path / str(seed), family, seed=seed)
        pair, half = Pair(folder), Pair(folder, torch.bfloat16)
        prompt = pair.prompt(45, seed=1)
        exact = pair.by_hand().step({0: prompt})
        ours = half.by_hand().step({0: prompt})
        theirs = half.reference(torch.tensor([prompt])).logits[0].float()
        error, their_error = ((logits - exact).abs().mean(1).median() for logits in (ours, theirs))
        total, their_total = total + error, their_total + their_error
    assert total < 1.2 * their_total


@pytest.mark.parametrize("variant", with_slow(VARIANTS, VARIANTS.keys() - EACH_KIND))
@torch.inference_mode()
def test_greedy_tokens_of_mixed_chunked_sequences_equal_those_of_transformers(pair_of, variant):
    pair = pair_of(variant)
    prompts = [pair.prompt(length, seed=length) for length in (23, 1, 8, 14)]
    outputs = pair.by_hand().generate(prompts, max_tokens=20, chunk=5)
    assert len(set(outputs[0])) > 2, "output that repeats one token would prove nothing"
    for prompt, output in zip(prompts, outputs, strict=True):
        # one look at the whole text says what each step would have chosen after the same tokens; without transformers'
        # cache, which cuts off by a `sliding_window` that Llama's code does not know
        logits = pair.reference(torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output

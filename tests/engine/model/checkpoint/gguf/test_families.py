"""GGUF files of every family and type, against transformers on the numbers that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.model.checkpoint import cache
from engine.model.checkpoint.gguf.entry import PLAIN, TYPES
from engine.model.checkpoint.resolve import resolve
from engine.model.ops.cpu.quantized_linear import Integers
from tests.batches import load_by_hand
from tests.gguf_files import ARCHITECTURES, WIDE, write_gguf
from tests.models import FAMILIES, HYBRIDS, make_model
from tests.products import each_once, in_turns, pairwise, slow
from tests.ranks import make_plans, on_all
from tests.transformers_models import make_transformers_model

IN_BLOCKS = sorted(TYPES.keys() - set(PLAIN))
IN_GGUF = [
    family
    for family, (name, _) in (FAMILIES | HYBRIDS).items()
    if getattr(transformers, f"{name}ForCausalLM").config_class.model_type in ARCHITECTURES
]
COMPUTED_BY_TRANSFORMERS = [
    "Glm4ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "Exaone4ForCausalLM", "Ernie4_5ForCausalLM", "SeedOssForCausalLM", "HunYuanDenseV1ForCausalLM",
    "GemmaForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "Starcoder2ForCausalLM", "ApertusForCausalLM",
    "Ministral3ForCausalLM",
]  # fmt: skip
# two layers and few experts: each is as wide as a block of the file, and unpacked once for each comparison
SMALL = {"num_hidden_layers": 2}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
# a file tells only at which distance layers have full attention
FOUR_LAYERS = {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_value_head_dim": 64,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 64, "shared_intermediate_size": 256}
GEMMA = {"num_hidden_layers": 6, "global_head_dim": 32, "vocab_size_per_layer_input": 97}
MLA = {
    "num_attention_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
# of a file nothing tells a model with a sliding window from Llama, nor one with heads of another scale
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"mlp_only_layers": [], "num_experts": 3},  # of which llama.cpp has no other
    "qwen3_moe": {"mlp_only_layers": [], "num_experts": 3, "norm_topk_prob": True},
    "granite4": HYBRID,
    "granite4_moe": {**HYBRID, "num_local_experts": 3},
    "qwen3_5": FOUR_LAYERS,
    "qwen3_8": FOUR_LAYERS,
    "qwen3_5_moe": {**FOUR_LAYERS, "num_experts": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_experts": 3},
    "qwen3_next": {**FOUR_LAYERS, "num_experts": 3, "mlp_only_layers": []},
    "gemma3n": GEMMA,
    "gemma4": GEMMA,
    "gemma4_moe": {**GEMMA, "num_experts": 3},
    # factors are in the file's weights
    "falcon_h1": {
        "mamba_d_head": 64,
        "mamba_d_ssm": 256,
        **dict.fromkeys(
            (
                "lm_head_multiplier",
                "embedding_multiplier",
                "key_multiplier",
                "attention_in_multiplier",
                "attention_out_multiplier",
                "ssm_in_multiplier",
                "ssm_out_multiplier",
            ),
            1.0,
        ),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
    },
    "nemotron_h": {
        "n_routed_experts": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "moe_latent_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": {
        **MLA,
        "q_lora_rank": None,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 3,
        "num_experts_per_token": 2,
    },
    "deepseek_v2": {
        **MLA,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {**MLA, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "glm4_moe_lite": {**MLA, "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "minicpm3": {**MLA, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    "Ministral3ForCausalLM": {"rope_parameters": YARN, "sliding_window": None},
    "GraniteForCausalLM": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "SmolLM3ForCausalLM": {"num_hidden_layers": 4},  # the last has no positions
    "Cohere2ForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "GemmaForCausalLM": {"tie_word_embeddings": True},
    "Starcoder2ForCausalLM": {"sliding_window": None},
    "Exaone4ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
    "Olmo3ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"]},
}


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")


def make(tmp_path: Path, family: str, type: str, **overrides: Any) -> tuple[Path, Path]:
    """A file, and the folder of what it stands for."""
    make_one = make_transformers_model if family in COMPUTED_BY_TRANSFORMERS else make_model
    source = make_one(tmp_path / "source", family, **{**SMALL, **WIDE, **OTHERS.get(family, {}), **overrides})
    return tmp_path / "model.gguf", write_gguf(source, tmp_path / "model.gguf", type)


KINDS = ("llama", "qwen3_moe")  # rows of q and k in another order; experts, which are in one tensor


@pytest.mark.parametrize(
    ("family", "type"),
    in_turns(IN_GGUF + COMPUTED_BY_TRANSFORMERS, TYPES) + pairwise(KINDS, slow(TYPES)),
)
@torch.inference_mode()
def test_a_file_gives_the_tokens_that_transformers_gives_for_its_numbers(tmp_path, caplog, family, type):
    file, numbers = make(tmp_path, family, type)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(numbers, dtype=torch.float32).eval()
    expected = oracle(torch.tensor([PROMPT])).logits[0]
    folder = resolve(str(file))
    torch.testing.assert_close(load_by_hand(folder).step({0: PROMPT}), expected, atol=2e-4, rtol=2e-4)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    greedy = oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert load_by_hand(folder).generate([PROMPT], 8, 5) == [greedy[0, len(PROMPT) :].tolist()]
    assert [record.getMessage() for record in caplog.records if "not used" in record.getMessage()] == []


def error(found: Tensor, expected: Tensor) -> float:
    """The ratio of root mean squares."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("type", IN_BLOCKS)
def test_weights_stay_in_blocks_and_mean_the_same_in_bfloat16(tmp_path, type):
    file, numbers = make(tmp_path, "llama", type)
    packed = load_by_hand(resolve(str(file)), dtype=torch.bfloat16)
    mlp = packed.model.layers[0].mlp
    assert all(isinstance(layer.kernel, Integers) for layer in (mlp.gate_up_proj, mlp.down_proj))
    assert error(packed.step({0: PROMPT}), load_by_hand(numbers).step({0: PROMPT})) < 0.06


@pytest.mark.parametrize(
    ("layout", "type"),
    each_once(
        [
            ("llama", False),
            ("qwen3_moe", False),
            ("qwen3_moe", True),
            ("qwen3_5", False),
            ("granite4_moe", True),
            ("deepseek_v3", True),
            ("qwen3_next", False),
            ("gemma4_moe", False),
            ("kimi_linear", True),
        ],
        ["Q4_1", "Q8_0", "Q6_K"],
    ),
)
def test_two_ranks_read_their_parts_of_the_blocks(tmp_path, layout, type):
    """Of 256 numbers that are in one block, too."""
    family, spread = layout
    file, numbers = make(tmp_path, family, type)
    folder, ranks = resolve(str(file)), make_plans(2, expert_parallel=spread)
    parts = [load_by_hand(folder, tp) for tp in ranks]
    expected = load_by_hand(numbers).step({0: PROMPT})
    for found in on_all(ranks, lambda rank: parts[rank].step({0: PROMPT})):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("type", "packed"), [("Q8_0", True), ("Q4_K", False)])
def test_tiled_value_heads_stay_in_blocks_where_no_block_holds_two_of_them(tmp_path, type, packed):
    file, numbers = make(tmp_path, "qwen3_5", type)
    model = load_by_hand(resolve(str(file)), dtype=torch.bfloat16)
    assert isinstance(model.model.layers[0].recurrent.out_proj.kernel, Integers) is packed
    assert error(model.step({0: PROMPT}), load_by_hand(numbers).step({0: PROMPT})) < 0.06


def test_layers_that_are_merged_but_differ_in_type_are_read_as_numbers(tmp_path):
    """As in llama.cpp's mixtures, such as Q4_K_M."""
    source = make_model(tmp_path / "source", "llama", **WIDE)
    numbers = write_gguf(source, tmp_path / "model.gguf", "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"})
    model = load_by_hand(resolve(str(tmp_path / "model.gguf")), dtype=torch.bfloat16)
    layer = model.model.layers[0]
    assert layer.self_attn.qkv_proj.kernel is None and isinstance(layer.mlp.gate_up_proj.kernel, Integers)
    assert error(model.step({0: PROMPT}), load_by_hand(numbers).step({0: PROMPT})) < 0.06


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_blocks_are_rounded_if_that_is_asked_for(tmp_path, quantization):
    file, numbers = make(tmp_path, "llama", "Q8_0")
    found = load_by_hand(resolve(str(file)), quantization=quantization).step({0: PROMPT})
    assert torch.equal(found, load_by_hand(numbers, quantization=quantization).step({0: PROMPT}))

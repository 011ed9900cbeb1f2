"""Fields of config.json that change the result and that nobody reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFolderError
from engine.model.checkpoint.folder import read_json
from engine.model.config import ModelConfig
from engine.model.families.unread import DECLARED, HARMLESS, UNUSED, declared_fields
from tests.models import FAMILIES, HYBRIDS, make_config
from tools.config_fields import as_text, declared

KNOWN = frozenset().union(*HARMLESS.values())
# Fields whose change another field forbids, which is then named.
RELATED = {
    "enable_moe_block", "hidden_activation", "n_routed_experts", "num_attention_heads", "num_experts",
    "num_hidden_layers", "num_local_experts",
}  # fmt: skip
# Fields that mean nothing in some models of tests/models.py, as another field says.
NO_WINDOW = {"max_window_layers", "sliding_window", "use_sliding_window"}
MEANINGLESS: dict[str, set[str]] = {
    "qwen2": NO_WINDOW,
    "qwen3": NO_WINDOW,
    "qwen3_moe": NO_WINDOW,
    "qwen2_moe": NO_WINDOW,
    "gemma4_moe": {"use_double_wide_mlp"},  # no layers without KV of their own
    "gemma4_unified": {"use_double_wide_mlp"},
    "phi3": {"original_max_position_embeddings"},  # a rotary embedding that is not scaled
    "bamba": {"mamba_expand"},  # mamba_d_head
    "granite4": {"mamba_expand", "intermediate_size", "num_experts_per_tok"},  # no experts, shared_intermediate_size
    "granite4_moe": {"mamba_expand"},
    "falcon_h1": {"mamba_expand", "mamba_d_ssm"},
    "lfm2": {"intermediate_size", "block_ffn_dim_multiplier"},  # block_ff_dim, block_auto_adjust_ff_dim
    "glm4_moe_lite": {"head_dim"},
    "deepseek_v32": {"head_dim", "first_k_dense_replace"},  # mlp_layer_types
    "glm_moe_dsa": {"head_dim", "first_k_dense_replace"},
}
LATENT_HEADS = {"num_key_value_heads"}  # as many as heads


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, 1]
    return f"{value}_other" if isinstance(value, str) else 2 * value + 1


def architecture_of(family: str) -> str:
    return f"{(FAMILIES | HYBRIDS)[family][0]}ForCausalLM"


@pytest.fixture
def read(tmp_path: Path):
    """Reads the configuration of a family's model, with changed fields."""

    def read(family: str, **changes: Any) -> ModelConfig:
        if not (tmp_path / "config.json").exists():
            make_config(family, dtype="float32", architectures=[architecture_of(family)]).save_pretrained(tmp_path)
        return ModelConfig.from_fields(read_json(tmp_path, "config.json") | changes, tmp_path)

    return read


def test_the_table_of_declared_fields_is_that_of_the_installed_transformers():
    assert DECLARED.read_text() == as_text(declared()), "run: python -m tools.config_fields"


@pytest.mark.parametrize("family", sorted(FAMILIES | HYBRIDS))
def test_each_declared_field_counts_or_is_refused_by_name_or_is_known_to_be_harmless(family, read, tmp_path):
    before, architecture = read(family), architecture_of(family)
    raw = read_json(tmp_path, "config.json")
    meaningless = MEANINGLESS.get(family, set()) | UNUSED.get(architecture, frozenset()) | {"eos_token_id"}
    if before.latent is not None:
        meaningless |= LATENT_HEADS
    for key, default in declared_fields()[architecture].items():
        if key in KNOWN or not isinstance(default, bool | int | float | str):
            continue
        value = raw.get(key)
        try:
            after = read(family, **{key: other(default if value is None else value)})
        except ModelFolderError as error:
            said = str(error)
            assert key in said or key in RELATED
        else:
            assert after != before or key in meaningless, f"{family} ignores {key}"


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gemma2", "use_bidirectional_attention", True),
        ("glm_moe_dsa", "mlp_bias", True),
        ("deepseek_v32", "mlp_bias", True),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "time_step_min", 0.1),
        ("qwen2_moe", "qkv_bias", False),
        ("deepseek_v2", "topk_method", "noisy"),
    ],
)
def test_a_field_that_nobody_reads_is_refused_with_its_value(family, field, value, read):
    with pytest.raises(ModelFolderError, match=rf"{field} = {value!r} is not supported: must be ") as refused:
        read(family, **{field: value})
    assert "\n" not in str(refused.value)


def test_layers_with_experts_are_those_that_mlp_layer_types_names(read):
    for family in ("deepseek_v32", "glm_moe_dsa", "kimi_linear"):
        layers = read(family).num_layers
        moe = read(family, mlp_layer_types=["sparse"] + ["dense"] * (layers - 1)).moe
        assert moe is not None and moe.layers == {0}
        with pytest.raises(ModelFolderError, match="mlp_layer_types"):
            read(family, mlp_layer_types=["hash_moe"] * layers)


def test_a_field_of_nobodys_class_is_a_warning(read, caplog):
    with caplog.at_level(logging.WARNING):
        assert read("llama", my_note="x", my_empty_note=None, bos_token_id=7, attention_dropout=0.5) == read("llama")
    assert [record.getMessage().partition("config.json ")[2] for record in caplog.records] == [
        "has fields that are not used: my_note"
    ]


def test_a_text_part_is_held_to_its_own_class(tmp_path):
    text = make_config("qwen2").to_diff_dict() | {"tie_word_embeddings": True, "num_attention_heads": 4}
    whole = {"architectures": ["InternVLForConditionalGeneration"], "dtype": "float32", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert ModelConfig.from_folder(tmp_path).num_layers == 3
    text["layer_types"] = ["linear_attention"] * 3
    with pytest.raises(ModelFolderError, match=r"layer_types = \['linear_attention'"):
        ModelConfig.from_fields(whole, tmp_path)


# As published, with the fields that older versions wrote and that nobody reads.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    },
    "Qwen2.5-72B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02, "intermediate_size": 29568,
        "max_position_embeddings": 32768, "max_window_layers": 70, "model_type": "qwen2", "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "phi-4": {
        "_name_or_path": "phi-4", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {}, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "pad_token_id": 100349,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 100352,
    },
    "Mixtral-8x7B-Instruct-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32000,
    },
    "gemma-2-9b-it": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 256000,
    },
    "DeepSeek-V2-Lite-Chat": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {},
        "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "all-MiniLM-L6-v2": {
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1536,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert ModelConfig.from_folder(tmp_path).hidden_size == PUBLISHED[name]["hidden_size"]

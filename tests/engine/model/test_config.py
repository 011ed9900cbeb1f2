from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ConfigError, ModelFolderError, UnsupportedArchitecture
from engine.model.checkpoint.folder import read_json
from engine.model.config import ModelConfig
from engine.model.config_parts.rope import RopeConfig
from engine.model.families.family import families
from engine.model.models.llama import LlamaForCausalLM
from engine.model.models.registry import model_class
from engine.model.quantization.mxfp4 import MXFP4
from engine.model.state import CHUNK, state_specs
from tests.models import make_model

# As published on the Hub, before transformers 5.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_MOE_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 1000,
}


PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}


@pytest.fixture
def read(tmp_path: Path):
    def read(
        config: dict[str, Any],
        generation: dict[str, Any] | None = None,
        max_model_len: int | None = None,
        **changes: Any,
    ) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_folder(tmp_path, max_model_len=max_model_len)

    return read


@pytest.mark.parametrize("architecture", families())
def test_every_family_with_a_configuration_has_a_model(architecture):
    assert issubclass(model_class(architecture), LlamaForCausalLM)


def test_llama_3_1_is_read_as_published(read):
    cfg = read(LLAMA_3_1_8B)
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (32, 8, 128)
    assert cfg.attention_scale == 128**-0.5
    assert cfg.dtype == "bfloat16"
    assert cfg.rope[0].type == "llama3"
    assert (cfg.rope[0].theta, cfg.rope[0].factor) == (500000.0, 8.0)
    assert set(cfg.window) == {None}
    assert cfg.eos_token_ids == {128001, 128008, 128009}
    assert cfg.moe is None


def test_gemma_3_is_read_as_published(read):
    cfg = read(GEMMA_3_1B)
    assert cfg.tie_word_embeddings, "unsaid in its config.json"
    assert cfg.window[:7] == (512, 512, 512, 512, 512, None, 512)
    assert cfg.rope[0] == RopeConfig(theta=10000)
    assert cfg.rope[5] == RopeConfig(theta=1000000)
    assert cfg.activation == "gelu_pytorch_tanh"


def test_gemma_3_stretches_the_rotary_embedding_of_its_global_layers_only(read):
    cfg = read(GEMMA_3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert cfg.rope[5] == RopeConfig(type="linear", theta=1000000, factor=8.0)
    assert cfg.rope[4] == RopeConfig(theta=10000)


def test_qwen3_moe_is_read_as_published(read):
    cfg = read(QWEN3_MOE_30B)
    assert cfg.moe is not None
    assert (cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.intermediate_size) == (128, 8, 768)
    assert cfg.moe.layers == frozenset(range(48))
    assert set(cfg.window) == {None}


def test_phi_4_mini_is_read_as_published(read):
    rope = read(PHI_4_MINI).rope[0]
    assert (rope.type, rope.partial_rotary_factor) == ("longrope", 0.75)
    assert rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


def test_longrope_takes_the_long_factors_if_any_sequence_may_exceed_the_original_context(read):
    assert read(PHI_4_MINI).rope[0].factors == (1.5,) * 48
    assert read(PHI_4_MINI, max_model_len=4097).rope[0].factors == (1.5,) * 48
    short = read(PHI_4_MINI, max_model_len=4096)
    assert short.rope[0].factors == (1.0,) * 48
    assert short.rope[0].attention_factor == read(PHI_4_MINI).rope[0].attention_factor


def test_longrope_with_a_wrong_number_of_factors_is_refused_by_name(read):
    rope = {**PHI_4_MINI["rope_scaling"], "long_factor": [1.5, 2.0]}
    with pytest.raises(ModelFolderError, match=r"long_factor = \[1\.5, 2\.0\]"):
        read(PHI_4_MINI, rope_scaling=rope)


def test_gpt_oss_is_read_as_published(read):
    cfg = read(GPT_OSS_20B)
    assert cfg.moe is not None and cfg.moe.router_bias and cfg.moe.norm_topk_prob
    assert (cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.intermediate_size) == (32, 4, 2880)
    assert cfg.window == (128, None) * 12
    assert cfg.qkv_bias and cfg.output_bias
    assert cfg.max_position_embeddings == 131072
    assert cfg.weight_format("layers.3.mlp", "experts") == MXFP4()
    for prefix, name in (
        ("layers.3.self_attn", "q_proj"),
        ("layers.3.self_attn", "o_proj"),
        ("layers.3.mlp", "router"),
    ):
        assert cfg.weight_format(prefix, name) is None


def test_glm_4_5_air_is_read_as_published(read):
    cfg = read(GLM_4_5_AIR)
    assert cfg.rope[0] == RopeConfig(theta=1000000, partial_rotary_factor=0.5)
    assert cfg.qkv_bias and not cfg.output_bias and not cfg.qk_norm
    assert cfg.moe is not None and cfg.moe.scoring == "sigmoid"
    assert cfg.moe.layers == frozenset(range(1, 46))
    assert (cfg.moe.shared_intermediate_size, cfg.moe.shared_gate) == (1408, False)
    assert cfg.num_nextn_predict_layers == 1


def test_clamped_gates_with_another_limit_are_refused_by_name(read):
    with pytest.raises(ModelFolderError, match=r"swiglu_limit = 10\.0"):
        read(GPT_OSS_20B, swiglu_limit=10.0)


@pytest.mark.parametrize("groups", [3, 128])
def test_groups_of_unequal_size_or_of_one_expert_are_refused_by_name(read, groups):
    with pytest.raises(ModelFolderError, match=f"n_group = {groups}"):
        read(GLM_4_5_AIR, n_group=groups)


def test_rope_parameters_of_transformers_5_say_the_same_as_the_older_fields(read):
    old = read(LLAMA_3_1_8B)
    fields = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = LLAMA_3_1_8B["rope_scaling"]
    new = read({**fields, "dtype": "bfloat16", "rope_parameters": {**scaling, "rope_theta": 500000.0}})
    assert new == old


def test_qwen2_has_biases_on_q_k_v_only_and_no_window_unless_told(read):
    cfg = read(QWEN2)
    assert cfg.qkv_bias
    assert not cfg.output_bias
    assert cfg.window == (None,) * 4
    assert read(QWEN2, use_sliding_window=True).window == (None, None, 1024, 1024)


def test_a_window_of_qwen3_moe_is_in_all_layers(read):
    windowed = {**QWEN3_MOE_30B, "use_sliding_window": True, "sliding_window": 1024}
    assert read(windowed, max_window_layers=48).window == (1024,) * 48
    assert read(windowed, layer_types=["full_attention"] * 48).window == (1024,) * 48


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_mixture_of_experts_that_does_not_say_of_how_many_is_refused(read, key):
    fields = {k: v for k, v in QWEN3_MOE_30B.items() if k != "num_experts"}
    assert read(fields, **{key: 128}).moe is not None
    with pytest.raises(ModelFolderError, match=r"config\.json has no 'num_experts'"):
        read(fields)


def test_a_key_that_is_not_the_familys_own_changes_nothing(read):
    foreign: dict[str, Any] = {
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 32,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 7.0,
        "qkv_bias": True,
        "num_experts": 4,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert read(LLAMA_3_1_8B, **foreign) == read(LLAMA_3_1_8B)
    mistral = {**LLAMA_3_1_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    ignored = {"attention_bias": True, "mlp_bias": True, "max_window_layers": 9, "use_sliding_window": False}
    assert read(mistral, **ignored) == read(mistral)
    assert read(QWEN2, attention_bias=True, mlp_bias=True, qkv_bias=False) == read(QWEN2)
    assert read(GEMMA_3_1B, use_sliding_window=False, mlp_bias=True) == read(GEMMA_3_1B)


def test_yarn_extends_the_context_by_its_factor(read):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cfg = read(QWEN2, rope_scaling=yarn)
    assert cfg.max_position_embeddings == 131072
    assert cfg.rope[0].attention_factor == pytest.approx(1.1386, abs=1e-4)
    # a model that already states the extended context is not extended again
    assert read(QWEN2, rope_scaling=yarn, max_position_embeddings=131072).max_position_embeddings == 131072


def test_end_tokens_of_the_generation_config_come_first(read):
    assert read(LLAMA_3_1_8B, {"eos_token_id": 7}).eos_token_ids == {7}
    assert read(LLAMA_3_1_8B, {"temperature": 0.6}).eos_token_ids == {128001, 128008, 128009}


@pytest.mark.parametrize("named", [{}, {"dtype": None}, {"torch_dtype": "auto"}])
def test_without_a_dtype_that_of_most_stored_weights_counts(read, tmp_path, named):
    assert read(QWEN2, **named).dtype == "float32", "without weights"
    tensors = {"norm": torch.ones(9), "scale": torch.ones(64, 64).to(torch.float8_e4m3fn), "up": torch.ones(4, 8)}
    save_file({**tensors, "up": tensors["up"].bfloat16()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert read(QWEN2, **named).dtype == "bfloat16"
    assert read(QWEN2, torch_dtype="float16").dtype == "float16"
    save_file({"up": tensors["up"].double()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="dtype = 'float64'"):
        read(QWEN2, **named)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("quantization_config", {"quant_method": "exl2"}, r"quantization_config.quant_method = 'exl2'"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0"),
        ("hidden_act", "relu", "hidden_act = 'relu'"),
        ("torch_dtype", "float8_e4m3fn", "dtype = 'float8_e4m3fn'"),
    ],
)
def test_a_feature_that_would_change_the_output_is_refused_by_name(read, field, value, shown):
    with pytest.raises(ModelFolderError, match=shown):
        read(QWEN2, **{field: value})


@pytest.mark.parametrize(
    ("family", "field", "value", "limit"),
    [
        ("bamba", "hidden_act", "gelu_pytorch_tanh", "silu"),
        ("qwen3_next", "hidden_act", "gelu_pytorch_tanh", "silu"),
        ("nemotron_h", "mamba_hidden_act", "gelu", "silu"),
        ("lfm2_moe", "use_expert_bias", False, "True"),
        ("longcat_flash", "router_bias", True, "False"),
        ("longcat_flash", "zero_expert_type", "copy", "identity"),
        ("longcat_flash", "zero_expert_num", 0, "at least 1"),
        ("mimo_v2_flash", "add_full_attention_sink_bias", True, "False"),
        ("mimo_v2_flash", "swa_v_head_dim", 16, "12"),
        ("mimo_v2_flash", "v_head_dim", 17, r"at most head_dim \(16\)"),
        ("mimo_v2_flash", "num_key_value_heads", 4, "a divisor of half of the 4 attention heads"),
        ("deepseek_v3", "attention_bias", True, "None or False"),
    ],
)
def test_what_a_family_computes_in_one_way_is_refused_in_another(tmp_path, family, field, value, limit):
    folder = make_model(tmp_path, family)
    raw = read_json(folder, "config.json")
    with pytest.raises(ModelFolderError, match=f"{field} = {value!r} is not supported: must be {limit}"):
        ModelConfig.from_fields(raw | {field: value}, folder)


def test_an_unknown_layer_type_is_refused_by_name(read):
    with pytest.raises(ModelFolderError, match="chunked_attention"):
        read(QWEN2, use_sliding_window=True, layer_types=["chunked_attention"] * 4)


def test_a_missing_field_is_named(read):
    with pytest.raises(ModelFolderError, match=r"config\.json has no 'vocab_size'"):
        read({k: v for k, v in QWEN2.items() if k != "vocab_size"})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["A"], "model_type": "a"}, "transformers .* does not know its model_type 'a'"),
        (
            {"architectures": ["A"], "model_type": "a", "auto_map": {"AutoModelForCausalLM": "a.A"}},
            r"code from a model's folder is never run \(trust_remote_code\)",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "no causal language model"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}, "attention to compressed tokens"),
        ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "recurrent state"),
    ],
    ids=["unknown", "remote code", "encoder-decoder", "DeepSeek V4", "recurrent"],
)
def test_an_architecture_that_cannot_work_is_refused_with_the_reason(read, config, reason):
    with pytest.raises(UnsupportedArchitecture, match=reason):
        read(config)


def test_kv_bytes_count_heads_that_several_ranks_hold(read):
    cfg = read(LLAMA_3_1_8B)
    assert cfg.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2
    assert cfg.kv_bytes_per_token(2, tp_size=4) == 2 * 32 * 2 * 128 * 2
    assert cfg.kv_bytes_per_token(2, tp_size=16) == 2 * 32 * 1 * 128 * 2
    with pytest.raises(ConfigError):
        cfg.kv_bytes_per_token(2, tp_size=3)


def test_numbers_that_json_has_none_for_are_read_as_transformers_writes_them(tmp_path):
    make_model(tmp_path, "mixtral", router_jitter_noise=math.inf)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    assert ModelConfig.from_folder(tmp_path).num_layers == 3
    assert read_json(tmp_path, "config.json")["router_jitter_noise"] == math.inf


def test_the_language_model_of_qwen_3_5_is_read_as_published(read):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_act": "silu", "max_position_embeddings": 262_144, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "rope_parameters": {**rope, "mrope_section": [11, 11, 10]},
    }  # fmt: skip
    cfg = read({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text})
    assert cfg.architecture == "Qwen3_5ForCausalLM"
    assert cfg.recurrent is not None
    assert [i for i in range(32) if i not in cfg.recurrent.layers] == list(range(3, 32, 4))
    assert cfg.rope[3] == RopeConfig(theta=1e7, partial_rotary_factor=0.25)
    (kept, *_), rows = state_specs(cfg.recurrent, "bfloat16"), CHUNK
    assert kept.kept_bytes == 4 * 32 * 128 * 128 + 2 * 16 * 8192, "2 MiB, and the inputs of the convolution"
    assert kept.row_bytes == 4 * rows * (16 * 128 + 32 * 128 + 32)


def test_the_language_model_of_qwen_3_8_is_read_as_one_of_qwen_3_5(read):
    """27B, in which each key head of linear attention has three value heads."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_act": "silu", "max_position_embeddings": 262_144, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    cfg = read({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text})
    assert cfg.architecture == "Qwen3_5ForCausalLM"
    assert cfg.recurrent is not None and len(cfg.recurrent.layers) == 48
    assert cfg.kv_bytes_per_token(2) == 64 << 10
    assert state_specs(cfg.recurrent, "bfloat16")[0].kept_bytes == 4 * 48 * 128 * 128 + 2 * 16 * 10_240


def test_mimo_v2_flash_is_read_as_published(read):
    """With the names that its authors give to fields."""
    cfg = read({
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152_576,
        "hidden_size": 4096, "intermediate_size": 16_384, "moe_intermediate_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "hybrid_layer_pattern": ([0] + [1] * 5) * 8, "moe_layer_freq": [0] + [1] * 47, "sliding_window_size": 128,
        "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_bias": False,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
        "layernorm_epsilon": 1e-5, "max_position_embeddings": 262_144, "tie_word_embeddings": False,
    })  # fmt: skip
    assert cfg.window[:7] == (None, 129, 129, 129, 129, 129, None)
    assert [(group.spec.num_kv_heads, len(group.layers)) for group in cfg.kv_groups] == [(4, 8), (8, 40)]
    assert cfg.rope[0] == RopeConfig(theta=5e6, partial_rotary_factor=0.334)
    assert cfg.rope[1] == RopeConfig(theta=1e4, partial_rotary_factor=0.334)
    assert cfg.moe is not None and cfg.moe.layers == frozenset(range(1, 48))
    assert (cfg.moe.scoring, cfg.moe.routed_scaling_factor, cfg.rms_norm_eps) == ("sigmoid", 1.0, 1e-5)
    assert (cfg.values.dim, cfg.values.scale) == (128, 0.707)


def test_longcat_flash_is_read_as_published(read):
    cfg = read({
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "vocab_size": 131_072,
        "hidden_size": 6144, "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048, "num_layers": 28,
        "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12,
        "routed_scaling_factor": 6.0, "router_bias": False, "rope_theta": 1e7, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "attention_bias": False, "attention_method": "MLA",
    })  # fmt: skip
    assert cfg.num_layers == 56, "one for each attention"
    assert cfg.kv_bytes_per_token(2) == 56 * 576 * 2
    assert cfg.moe is not None and cfg.moe.layers == frozenset(range(0, 56, 2))
    assert (cfg.moe.num_experts, cfg.moe.zero_experts, cfg.moe.experts_per_token) == (512, 256, 12)
    assert (cfg.intermediate_size, cfg.moe.intermediate_size) == (12_288, 2048)


def test_deepseek_v3_is_read_as_published(read):
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    cfg = read({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129_280,
        "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 163_840,
        "rope_theta": 10_000, "rope_scaling": rope, "num_nextn_predict_layers": 1,
    })  # fmt: skip
    assert (cfg.num_kv_heads, cfg.head_dim) == (1, 576)
    assert cfg.attention_scale == pytest.approx(0.13523, rel=1e-4)
    assert cfg.rope[0].attention_factor == 1.0
    assert cfg.moe is not None
    assert cfg.moe.layers == frozenset(range(3, 61))
    assert (cfg.moe.shared_intermediate_size, cfg.moe.num_groups, cfg.moe.topk_groups) == (2048, 8, 4)


GEMMA_4_E4B = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 2560, "intermediate_size": 10_240,
    "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "global_head_dim": 512, "num_kv_shared_layers": 18, "sliding_window": 512, "use_double_wide_mlp": False,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 7), "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256, "max_position_embeddings": 131_072,
}  # fmt: skip


def of_whole(text: dict[str, Any], name: str = "Gemma4") -> dict[str, Any]:
    kind = text["model_type"].removesuffix("_text")
    return {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text}


def test_layers_of_gemma_4_e4b_that_read_the_kv_of_others_hold_none(read):
    cfg = read(of_whole(GEMMA_4_E4B))
    full, windowed = cfg.kv_groups
    assert (len(full.layers), full.spec.head_dim, full.spec.window) == (4, 512, None)
    assert (len(windowed.layers), windowed.spec.head_dim, windowed.spec.window) == (20, 256, 512)
    assert cfg.kv_place(41) == cfg.kv_place(23) == (0, 3)
    assert cfg.kv_place(40) == cfg.kv_place(22) == (1, 19)
    assert cfg.rope[5] == RopeConfig(type="proportional", theta=1e6, partial_rotary_factor=0.25)


def test_layers_of_gemma_4_31b_without_a_window_have_fewer_and_larger_heads(read):
    text = GEMMA_4_E4B | {
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "num_kv_shared_layers": 0,
        "layer_types": None, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    full, windowed = read(of_whole(text)).kv_groups
    assert (len(full.layers), full.spec.num_kv_heads, full.spec.head_dim) == (10, 4, 512)
    assert (len(windowed.layers), windowed.spec.num_kv_heads, windowed.spec.head_dim) == (50, 16, 256)


def test_gemma_4_with_attention_in_both_directions_is_refused(read):
    with pytest.raises(ModelFolderError, match="use_bidirectional_attention = 'all'"):
        read(of_whole(GEMMA_4_E4B | {"use_bidirectional_attention": "all"}))


def test_the_mlps_of_gemma_3n_have_the_sizes_that_each_layer_names(read):
    text = {
        "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 30, "num_kv_shared_layers": 10,
        "intermediate_size": [8192] * 10 + [16_384] * 20,
    }  # fmt: skip
    cfg = read(of_whole(text, "Gemma3n"))
    assert cfg.gemma.mlp_sizes == (8192,) * 10 + (16_384,) * 20
    assert cfg.gemma.sparsity == (0.95,) * 10 + (0.0,) * 20
    assert [len(group.layers) for group in cfg.kv_groups] == [4, 16]
    with pytest.raises(ModelFolderError, match="intermediate_size"):
        read(of_whole(text | {"intermediate_size": [8192] * 3}, "Gemma3n"))

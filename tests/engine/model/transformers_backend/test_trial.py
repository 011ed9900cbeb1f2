"""What a trial forward pass of transformers' code finds out before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from benchmarks.fallback import without_native_code
from engine.distributed.tp_group import TPGroup
from engine.errors import UnsupportedArchitecture
from engine.model.config import ModelConfig
from engine.model.models.registry import build_model
from engine.model.noise import fill_with_noise
from engine.model.shard import ShardPlan
from engine.model.transformers_backend.attention import Mask
from engine.model.transformers_backend.layers import MergedPart, Norm, OurExperts, RowLinear
from engine.model.transformers_backend.model import find_calls
from tests.models import COMMON, make_model
from tests.transformers_models import make_transformers_model


def config_of(tmp_path, config) -> ModelConfig:
    config.save_pretrained(tmp_path)
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.DiffLlamaConfig, "a layer attends twice"),
        (transformers.FalconConfig, "has no exchangeable attention for it"),
        (transformers.MambaConfig, "some or all of its layers keep a recurrent state"),
        (transformers.JambaConfig, "some or all of its layers keep a recurrent state"),
        (transformers.JetMoeConfig, "a trial of transformers' code with our layers fails"),
    ],
    ids=[
        "two attentions",
        "no interface",
        "no attention",
        "recurrent layers",
        "a failure",
    ],
)
def test_a_model_that_needs_more_of_attention_is_refused_before_it_is_loaded(tmp_path, config, reason):
    names = {"DiffLlamaConfig": "DiffLlamaForCausalLM"}
    more: dict[str, Any] = (
        {"layer_types": ["conv", "full_attention", "conv"]} if config is transformers.Lfm2Config else {}
    )
    if config is not transformers.MambaConfig:  # which has none
        more["num_attention_heads"] = 4
    made = config(**more, num_hidden_layers=3, hidden_size=64, vocab_size=97)
    made.architectures = [names.get(config.__name__, config.__name__.replace("Config", "ForCausalLM"))]
    with pytest.raises(UnsupportedArchitecture, match=reason):
        find_calls(config_of(tmp_path, made), ShardPlan())


def test_values_of_another_size_than_keys_are_refused_before_a_model_is_loaded(tmp_path):
    with without_native_code("MiMoV2FlashForCausalLM"):
        cfg = ModelConfig.from_folder(make_model(tmp_path, "mimo_v2_flash"))
        with pytest.raises(UnsupportedArchitecture, match="its keys and values differ in size"):
            find_calls(cfg, ShardPlan())


def test_an_unknown_keyword_of_attention_is_an_error_at_start(tmp_path, monkeypatch):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path, "SmolLM3ForCausalLM"))
    attention = transformers.models.smollm3.modeling_smollm3.SmolLM3Attention
    forward = attention.forward

    def with_more(self, *args, **kwargs):
        return forward(self, *args, **kwargs, indices=torch.zeros(1))

    monkeypatch.setattr(attention, "forward", with_more)
    with pytest.raises(UnsupportedArchitecture, match="keyword 'indices', which is not known here"):
        build_model(cfg, ShardPlan(), torch.float32, "cpu")


def test_windows_and_chunks_are_found_where_transformers_applies_them(tmp_path):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path / "olmo", "Olmo3ForCausalLM"))
    calls = find_calls(cfg, ShardPlan())
    masks = [call.mask for call in sorted(calls.values(), key=lambda call: call.layer)]
    assert masks == [Mask(window=8), Mask(), Mask(window=8)]
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path / "llama", "Llama4ForCausalLM"))
    calls = find_calls(cfg, ShardPlan())
    masks = [call.mask for call in sorted(calls.values(), key=lambda call: call.layer)]
    assert masks == [Mask(chunk=8), Mask(), Mask(chunk=8)]


def test_what_our_layers_compute_takes_the_place_of_transformers_own(tmp_path):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path, "Dots1ForCausalLM"))
    model = build_model(cfg, ShardPlan(TPGroup(0, 2)), torch.float32, "cpu")
    layer = model.base.layers[1]
    assert isinstance(layer.self_attn.q_proj, MergedPart) and layer.self_attn.qkv_proj.outputs == 48
    assert isinstance(layer.self_attn.o_proj, RowLinear)
    assert isinstance(layer.input_layernorm, Norm) and isinstance(layer.mlp.experts, OurExperts)


@pytest.mark.parametrize("name", ["Dots1ForCausalLM", "GraniteMoeForCausalLM", "Llama4ForCausalLM"])
def test_a_rank_holds_a_slice_of_every_expert_however_the_checkpoint_stores_them(tmp_path, name):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path, name))
    whole, half = (build_model(cfg, ShardPlan(TPGroup(0, size)), torch.float32, "cpu") for size in (1, 2))
    found = [[m for m in model.modules() if isinstance(m, OurExperts)] for model in (whole, half)]
    assert all(found)
    for one, other in zip(*found, strict=True):
        assert one.gate_up.shape[1] == 2 * other.gate_up.shape[1] and one.down.shape[2] == 2 * other.down.shape[2]
    fill_with_noise(half)
    assert all(parameter.isfinite().all() for parameter in half.parameters())


def test_longrope_keeps_the_frequencies_of_the_longest_sequence_that_may_come(tmp_path):
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    make_transformers_model(tmp_path, "Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=128)
    assert COMMON["max_position_embeddings"] == 512
    frequencies = []
    with without_native_code("Phi3ForCausalLM"):
        for longest in (128, 512):
            cfg = ModelConfig.from_folder(tmp_path, max_model_len=longest)
            model = build_model(cfg, ShardPlan(), torch.float32, "cpu")
            frequencies.append(model.base.rotary_emb.inv_freq)
            assert model.base.rotary_emb.rope_type == "default"
    torch.testing.assert_close(frequencies[0], frequencies[1] * 4)

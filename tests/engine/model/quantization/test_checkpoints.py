"""Models with quantized weights against the same models with the weights that those stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ConfigError, ModelFolderError
from engine.model.config import ModelConfig
from engine.model.models.registry import build_model
from engine.model.shard import ShardPlan
from tests.batches import load_by_hand
from tests.engine.model.quantization.checkpoints import (
    BLOCKS,
    FORMATS,
    FP8,
    W8A8,
    awq,
    compressed,
    fp8,
    is_linear,
    quantize_folder,
)
from tests.models import FAMILIES, SLOW_ENGINES, make_model
from tests.ranks import make_plans, on_all

# With two ranks 96 / 2 columns of a row-parallel layer are one group of 32 and a half.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
STEPS = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


def logits(folder: Path, **options: Any) -> list[Tensor]:
    model = load_by_hand(folder, **options)
    return [model.step(tokens) for tokens in STEPS]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant_on_one_rank_and_on_two(source, tmp_path, name):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    expected = logits(tmp_path / "twin")
    torch.testing.assert_close(logits(tmp_path / "model"), expected, atol=1e-4, rtol=0)
    ranks = make_plans(2)
    parts = [load_by_hand(tmp_path / "model", tp) for tp in ranks]
    for found in on_all(ranks, lambda rank: [parts[rank].step(tokens) for tokens in STEPS]):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
OWN_SHAPE = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "deepseek_v2": {"kv_lora_rank": 32, "v_head_dim": 16},
    "mimo_v2_flash": {"v_head_dim": 8},
    **dict.fromkeys(("deepseek_v3", "minicpm3", "deepseek_v32", "glm_moe_dsa", "longcat_flash"), LATENT),
}
# Phi 3's blocks would span q and k here; gpt-oss is quantized in its own way: test_mxfp4.py; Gemma 4's experts lie in
# one tensor, which these formats do not know
PAIRS = [
    pytest.param(family, name, marks=[pytest.mark.slow] * ((family in SLOW_ENGINES) or i % 2 == (name == "awq")))
    for i, family in enumerate(FAMILIES)
    for name in ("fp8_blocks", "awq")
    if family not in ("gpt_oss", "gemma4_moe") and (family, name) != ("phi3", "fp8_blocks")
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_every_family_runs_with_quantized_weights(tmp_path, family, name):
    source = make_model(tmp_path / "source", family, **SHAPE | OWN_SHAPE.get(family, {}))
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    torch.testing.assert_close(logits(tmp_path / "model"), logits(tmp_path / "twin"), atol=1e-4, rtol=0)


def test_inputs_in_eight_bits_stay_close_to_the_weights_that_are_meant(source, tmp_path):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *W8A8)
    found, expected = (torch.cat(logits(tmp_path / name)) for name in ("model", "twin"))
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 1e-4 < error < 0.04, "rounded, but with a scale for every token"


@pytest.mark.parametrize(
    ("config", "quantize", "ignored"),
    [
        (FORMATS["ct_fp8_channel"][0] | {"ignore": ["lm_head", "re:.*self_attn.*"]}, fp8(per="channel"), "self_attn"),
        (
            FORMATS["ct_fp8_channel"][0] | {"ignore": ["lm_head", "model.layers.1.mlp.down_proj"]},
            fp8(per="channel"),
            "layers.1.mlp.down_proj",
        ),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp"]}, fp8(), "layers.0.mlp"),
        (BLOCKS | {"ignored_layers": ["o_proj"]}, fp8(), "o_proj"),
        (FORMATS["awq"][0] | {"modules_to_not_convert": ["self_attn"]}, awq(32), "self_attn"),
    ],
)
def test_layers_that_the_config_leaves_out_are_read_as_they_are(source, tmp_path, config, quantize, ignored):
    quantize_folder(
        source, tmp_path / "model", tmp_path / "twin", config, quantize, lambda n: is_linear(n) and ignored not in n
    )
    torch.testing.assert_close(logits(tmp_path / "model"), logits(tmp_path / "twin"), atol=1e-4, rtol=0)


def test_groups_of_layers_may_have_formats_of_their_own(source, tmp_path):
    config = FORMATS["ct_fp8_channel"][0]
    int4 = FORMATS["ct_int4"][0]["config_groups"]["group_0"]
    groups = {
        "attention": config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
        "mlp": int4 | {"targets": ["re:.*mlp.*"], "format": "pack-quantized"},
    }
    half, twin = tmp_path / "half", tmp_path / "half_twin"
    quantize_folder(source, half, twin, {}, fp8(per="channel"), lambda n: is_linear(n) and "self_attn" in n)
    quantize_folder(
        half,
        tmp_path / "model",
        tmp_path / "unused",
        config | {"config_groups": groups},
        FORMATS["ct_int4"][1],
        lambda n: is_linear(n) and "mlp" in n,
    )
    quantize_folder(twin, tmp_path / "unused", tmp_path / "twin", {}, FORMATS["ct_int4"][1], lambda n: "mlp" in n)
    torch.testing.assert_close(logits(tmp_path / "model"), logits(tmp_path / "twin"), atol=1e-4, rtol=0)


def test_weights_that_are_rounded_when_loaded_are_those_of_a_checkpoint_with_a_scale_per_output(source, tmp_path):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", {}, fp8(per="channel"))
    found, expected = logits(source, quantization="fp8"), logits(tmp_path / "twin")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(found[0], logits(source)[0], atol=1e-2)


def test_a_quantized_model_is_not_quantized_again(source, tmp_path):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS["awq"])
    with pytest.raises(ConfigError, match=r"quantization must be left out: the model is quantized \(awq\)"):
        ModelConfig.from_folder(tmp_path / "model", "fp8")


@pytest.mark.parametrize(("name", "method"), [("fp8_tensor", "fp8"), ("awq", "awq"), ("gptq", "gptq")])
def test_the_option_may_name_how_a_model_is_quantized(source, tmp_path, name, method):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    found = ModelConfig.from_folder(tmp_path / "model", method)
    assert found == ModelConfig.from_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="quantization must be left out: the model is not quantized"):
        ModelConfig.from_folder(source, "awq")


def group(**changes: Any) -> dict[str, Any]:
    config = compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32})
    config["config_groups"]["group_0"] |= changes
    return config


REFUSED = {
    "quant_method = 'exl2' is not supported: must be fp8 or": {"quant_method": "exl2"},
    "weight_block_size = [128] ": BLOCKS | {"weight_block_size": [128]},
    "fmt = 'e5m2' ": BLOCKS | {"fmt": "e5m2"},
    "version = 'gemv' ": FORMATS["awq"][0] | {"version": "gemv"},
    "zero_point = False ": FORMATS["awq"][0] | {"zero_point": False},
    "bits = 3 ": FORMATS["gptq"][0] | {"bits": 3},
    "group_size = None ": FORMATS["gptq"][0] | {"group_size": None},
    "lm_head = True ": FORMATS["gptq"][0] | {"lm_head": True},
    "checkpoint_format = 'marlin' ": FORMATS["gptq"][0] | {"checkpoint_format": "marlin"},
    "format = 'nvfp4-pack-quantized' ": compressed("nvfp4-pack-quantized", {}),
    "config_groups.group_0.num_bits = 3 ": group(weights={"num_bits": 3, "type": "int", "group_size": 32}),
    "config_groups.group_0.strategy = 'tensor' ": group(weights={"num_bits": 4, "strategy": "tensor"}),
    "config_groups.group_0.input_activations = {": group(input_activations={"num_bits": 8}),
    "config_groups.group_0.output_activations = {": group(output_activations={"num_bits": 8}),
    "config_groups.group_0.weights = None ": group(weights=None),
    "ignore = [] ": group() | {"ignore": []},
}


@pytest.mark.parametrize("shown", REFUSED)
def test_a_scheme_that_is_not_supported_is_refused_by_its_key(source, tmp_path, shown):
    fields = json.loads((source / "config.json").read_text()) | {"quantization_config": REFUSED[shown]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelFolderError, match=re.escape(f"quantization_config.{shown}")):
        ModelConfig.from_folder(tmp_path)


def test_layers_that_are_merged_must_be_quantized_alike(source, tmp_path):
    config = FORMATS["ct_fp8_channel"][0] | {"ignore": ["lm_head", "re:.*k_proj"]}
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", config, fp8(per="channel"))
    with pytest.raises(ConfigError, match=r"quantized like .*q_proj.*k_proj"):
        load_by_hand(tmp_path / "model")


def drop_scale(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight_scale_inv"]


def shrink_scale(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    tensors[name] = tensors[name][:1].clone()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_scale, "1 missing tensors: model.layers.1.mlp.down_proj.weight_scale_inv"),
        (shrink_scale, "q_proj.weight_scale_inv has shape [1, 3], config.json asks for [4, 3]"),
    ],
)
def test_a_checkpoint_that_lacks_what_its_format_needs_is_refused_by_name(
    source, tmp_path, change: Callable[[dict[str, Tensor]], None], problem
):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS["fp8_blocks"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelFolderError, match=re.escape(problem)):
        load_by_hand(tmp_path / "model")


@pytest.mark.parametrize(("value", "fits"), [(0.0, True), (1.0, False)])
def test_biases_that_the_model_does_not_have_must_be_zero(source, tmp_path, value, fits):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS["gptq"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.full((64,), value)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    if fits:
        assert logits(tmp_path / "model")[0].isfinite().all()
    else:
        with pytest.raises(ModelFolderError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.o_proj\.bias"):
            load_by_hand(tmp_path / "model")


def test_half_of_the_bytes_are_read_of_a_model_in_eight_bits(source, tmp_path):
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS["fp8_blocks"])
    cfg = ModelConfig.from_folder(tmp_path / "model")
    model = build_model(cfg, ShardPlan(), torch.bfloat16, "cpu")
    assert {t.dtype for t in model.layers[0].mlp.down_proj.stored.tensors[""].values()} == {FP8, torch.float32}

"""What an engine does with a native model it does with one of transformers: graphs, quantized weights. Handoffs are in
tests/engine/kv_transfer/test_families.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fallback import without_native_code
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.ops import dispatch
from tests.batches import load_by_hand
from tests.engine.model.quantization.checkpoints import is_linear, quantize_folder
from tests.engine.model.quantization.test_checkpoints import FORMATS
from tests.engine.model.transformers_backend.test_parity import random_prompt, run
from tests.late_device import LateDevice
from tests.models import FAMILIES, make_model, with_slow
from tests.products import few
from tests.transformers_models import make_transformers_model


def make_config(folder, **options) -> EngineConfig:
    sizes = {
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 4,
        "num_threads": 1,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(model=str(folder), dtype="float32", **{**sizes, **options})


@pytest.mark.parametrize(
    "name",
    with_slow(
        ["SmolLM3ForCausalLM", "Olmo2ForCausalLM", "VaultGemmaForCausalLM", "PhimoeForCausalLM"],
        ["SmolLM3ForCausalLM", "Olmo2ForCausalLM", "VaultGemmaForCausalLM"],
    ),
)
def test_padded_graphs_give_the_tokens_of_plain_steps(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)  # they know no padding
    folder, device = make_transformers_model(tmp_path, name), LateDevice()
    prompts = {str(length): random_prompt(length) for length in (20, 5, 9)}
    plain = build_engine(make_config(folder))
    expected, _ = run(plain, prompts)
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: device)
    graphs = build_engine(make_config(folder))
    assert run(graphs, prompts)[0] == expected
    assert device.replays
    plain.close()
    graphs.close()


@pytest.mark.parametrize("name", few(1, ["gptq", "fp8_blocks", "awq"]))
def test_quantized_weights_give_the_logits_of_the_weights_that_are_meant(tmp_path, name):
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 32}
    source = make_transformers_model(tmp_path / "source", "Dots1ForCausalLM", **shape)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    found, expected = (logits(tmp_path / folder) for folder in ("model", "twin"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_projections_that_are_not_quantized_alike_are_computed_apart(tmp_path):
    config, quantize = FORMATS["fp8_blocks"]
    source = make_transformers_model(tmp_path / "source", "SmolLM3ForCausalLM")
    quantize_folder(
        source, tmp_path / "model", tmp_path / "twin", config | {"modules_to_not_convert": ["k_proj"]}, quantize,
        lambda name: is_linear(name) and "k_proj" not in name,
    )  # fmt: skip
    found, expected = (logits(tmp_path / folder) for folder in ("model", "twin"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


# transformers' code of latent attention is refused
NATIVE_ONLY = ("kv_lora_rank", "num_kv_shared_layers", "attention_k_eq_v")  # keys of their configurations
WITH_BOTH = [name for name, (_, fields) in FAMILIES.items() if not any(key in fields for key in NATIVE_ONLY)]


@pytest.mark.parametrize("family", with_slow(WITH_BOTH))
def test_native_code_and_transformers_code_give_the_same_logits(tmp_path, family):
    folder = make_model(tmp_path, family)
    native = logits(folder)
    with without_native_code(ModelConfig.from_folder(folder).architecture):
        torch.testing.assert_close(logits(folder), native, atol=1e-4, rtol=0)


def test_torch_compile_is_refused_in_one_line(tmp_path):
    folder = make_transformers_model(tmp_path, "SmolLM3ForCausalLM")
    with pytest.raises(ConfigError, match="torch_compile must be false for SmolLM3ForCausalLM"):
        build_engine(make_config(folder, torch_compile=True))


@torch.inference_mode()
def logits(folder) -> torch.Tensor:
    hand = load_by_hand(folder)
    return torch.cat([hand.step({0: random_prompt(20)}), hand.step({0: [9], 1: [8, 11]})])

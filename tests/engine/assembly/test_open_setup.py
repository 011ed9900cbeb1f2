"""What a GPU is asked to compute that no GPU has computed yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly.open_setup import open_setup
from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model.config_parts.latent import LatentConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.config_parts.recurrent import RecurrentConfig
from engine.model.ops import dispatch
from engine.model.quantization.scheme import online
from engine.parts.images.fitting import images_only
from engine.runner.rank_setup import RankSetup
from tests.engine.model.model_configs import tiny_config
from tests.late_device import LateDevice

RECURRENT = RecurrentConfig(layers=(0,), kernel=4, heads=4, key_heads=2, key_dim=16, value_dim=16)
LATENT = LatentConfig(rank=16, q_rank=None, nope_dim=8, rope_dim=8, value_dim=8, interleaved=True)
MOE = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=20, norm_topk_prob=True, layers=frozenset({0}))
UNTESTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the model, and options
    "recurrent layers": ({"recurrent": RECURRENT, "block_types": ("linear_attention",)}, {}),
    "latent attention": ({"latent": LATENT}, {}),
    "adapters": ({}, {"enable_lora": True}),
    "quantized experts": ({"moe": MOE, "quantization": online("int8")}, {}),
}
TESTED: dict[str, dict[str, Any]] = {
    "dense": {}, "experts": {"moe": MOE}, "quantized": {"quantization": online("int8")}
}  # fmt: skip


class OnCuda(LateDevice):
    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda")


def setup(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], device: Any, config: EngineConfig) -> RankSetup:
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: device)
    monkeypatch.setattr(dispatch, "triton_found", lambda: True)
    return open_setup(config, replace(tiny_config(), **fields), Path(), TPGroup.single())


@pytest.mark.parametrize("part", UNTESTED)
def test_kernels_that_no_gpu_has_run_are_refused_by_the_part_of_the_model_and_the_option(part, monkeypatch):
    fields, options = UNTESTED[part]
    error = rf"allow_untested_kernels must be true for {part} of Llama.*, whose kernels were not run on a GPU yet"
    with pytest.raises(ConfigError, match=error):
        setup(monkeypatch, fields, OnCuda(), EngineConfig(**options))
    assert setup(monkeypatch, fields, OnCuda(), EngineConfig(allow_untested_kernels=True, **options))


@pytest.mark.parametrize("part", UNTESTED)
def test_without_our_kernels_nothing_is_refused(part, monkeypatch):
    fields, options = UNTESTED[part]
    assert setup(monkeypatch, fields, LateDevice(), EngineConfig(**options))
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: False)
    assert setup(monkeypatch, fields, OnCuda(), EngineConfig(**options))


@pytest.mark.parametrize("part", UNTESTED)
def test_an_engine_that_only_encodes_images_needs_no_option_for_the_layers_that_it_does_not_compute(part, monkeypatch):
    fields, options = UNTESTED[part]
    assert setup(monkeypatch, fields, OnCuda(), images_only(EngineConfig(**options)))


@pytest.mark.parametrize("part", TESTED)
def test_other_models_need_no_option(part, monkeypatch):
    assert setup(monkeypatch, TESTED[part], OnCuda(), EngineConfig())

"""gpt-oss with experts in MXFP4, against the same model with what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import pack_weights
from engine.model.models.registry import build_model
from engine.model.noise import fill_with_noise
from engine.model.shard import ShardPlan
from tests.batches import ByHand, load_by_hand
from tests.mxfp4_files import make_mxfp4
from tests.ranks import make_plans, on_all

# With two ranks each has 48 inputs of `down_proj`: one group of 32 and a half.
STEPS = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with random experts in MXFP4, and its twin in float32."""
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("twin"))


def logits(model: ByHand) -> list[Tensor]:
    return [model.step(tokens) for tokens in STEPS]


def test_logits_are_those_of_what_transformers_dequantizes_on_one_rank_and_on_two(folders):
    quantized, twin = folders
    expected = logits(load_by_hand(twin))
    torch.testing.assert_close(logits(load_by_hand(quantized)), expected, atol=1e-4, rtol=0)
    ranks = make_plans(2)
    parts = [load_by_hand(quantized, tp) for tp in ranks]
    for found in on_all(ranks, lambda rank: logits(parts[rank])):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_noise_in_place_of_packed_experts_gives_finite_logits(folders):
    cfg = ModelConfig.from_folder(folders[0])
    model = build_model(cfg, ShardPlan(), torch.float32, "cpu")
    fill_with_noise(model)
    pack_weights(model)
    assert torch.cat(logits(ByHand(model, cfg, tp=ShardPlan()))).isfinite().all()


def test_experts_in_another_format_are_refused_by_name(folders):
    with pytest.raises(ConfigError, match="mxfp4"):
        load_by_hand(folders[1], quantization="fp8")

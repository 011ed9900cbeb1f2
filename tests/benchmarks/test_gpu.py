"""`make bench-gpu` as far as it needs no GPU: its floors, and how it goes on after a part that has lost the card."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.memory_floor import weight_bytes
from engine.model.config import ModelConfig


@pytest.fixture
def config_of(tmp_path):
    def config(shape: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(gpu.SHAPES[shape]))
        return ModelConfig.from_folder(tmp_path)

    return config


@pytest.mark.parametrize("shape", gpu.SHAPES)
def test_a_decode_step_has_to_read_what_the_matrices_of_the_model_take(shape, config_of):
    config = config_of(shape)
    read = weight_bytes(config, torch.bfloat16, batch_size=0)
    assert gpu.matrix_bytes(config, 2) == pytest.approx(read, rel=1e-3), "all but the norms"
    assert gpu.matrix_bytes(config, 1) == gpu.matrix_bytes(config, 2) - gpu.linear_parameters(config)


def test_a_process_that_goes_on_finds_the_rates_of_the_card_and_the_parts_that_are_done(tmp_path):
    card = gpu.Card(bytes_per_s=4.3e12, flops=7.9e14)
    parts = [gpu.Part("copy", 1.5, {"GB/s": 4300.0}), gpu.Part("decode", 2.0, problem="AcceleratorError: CUDA error")]
    gpu.save(tmp_path / "out", "a card", card, parts)
    assert gpu.saved(tmp_path / "out") == (card, parts)
    assert "| decode | AcceleratorError: CUDA error | 2 s |" in (tmp_path / "out/gpu.md").read_text()

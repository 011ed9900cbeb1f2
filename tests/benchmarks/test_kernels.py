"""Kernels of a step are timed for models whose layers keep different KV, states or latents."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.kernels import Watch, fill, measure_step
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.model.ops.cpu.kernel import CpuKernel
from tests.models import make_model


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("gemma3", {"attend"}), ("qwen3_next", {"attend", "causal_conv", "linear_attention"})],
)
@torch.inference_mode()
def test_every_kernel_of_a_step_is_timed(tmp_path, monkeypatch, family, kernels):
    folder = make_model(tmp_path, family)
    core = build_engine(
        EngineConfig(model=str(folder), num_gpu_blocks_override=64, block_size=4, num_threads=1, dtype="float32")
    )
    monkeypatch.setattr(CpuKernel, "launch", CpuKernel.launch)  # undone after the test
    fill(core.ranks.runner)
    watch = Watch(time.perf_counter)
    for step in ("2x1@20", "1x9@9"):
        found = measure_step(core.ranks.runner, watch, step)
        print(found)
        assert found.keys() >= kernels
        assert all(work.calls and work.seconds for work in found.values())
    core.close()

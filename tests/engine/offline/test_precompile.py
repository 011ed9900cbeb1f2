"""Kernels that were compiled for a model are compiled by nobody again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

COMMON = """
import random
from benchmarks.gpu.engines import shape_config
from engine.config import EngineConfig
from engine.model.ops.gpu.compile_target import variants
from engine.offline.precompile import Step, compile_all, compute, needed
from engine.offline.weightless_model import WeightlessModel
small = shape_config("0.6B", num_hidden_layers=1)
"""
COMPILE = """
engine = EngineConfig(model="", max_num_seqs=2, max_num_batched_tokens=128, block_size=64)
print(compile_all(needed(engine, small, (9, 0)), (9, 0)))
"""
RANDOM_STEPS = """
model, chance = WeightlessModel(small, block_size=64), random.Random(0)
with variants(90) as found:
    for _ in range(20):
        seqs = chance.randint(1, 2)
        tokens = chance.choice((seqs, chance.randint(seqs, 128)))
        compute(model, Step(tokens, seqs, chance.randint(-(-tokens // seqs), 512)))
for variant in found.values():
    variant.compile(90)
print(len(found))
"""


def logging_ptxas(folder: Path) -> tuple[Path, Path]:
    """Return Triton's compiler as a program that notes how it was called, and its notes."""
    program, notes = folder / "ptxas", folder / "calls"
    real = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {real} "$@"\n')
    program.chmod(0o755)
    return program, notes


@pytest.mark.slow
def test_after_all_kernels_of_a_model_were_compiled_its_steps_never_call_the_compiler(tmp_path):
    program, notes = logging_ptxas(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_PTXAS_PATH": str(program)}

    def run(code: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", COMMON + code], env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    count = run(COMPILE)
    assert count > 5
    assert "--gpu-name" in notes.read_text(), "the compiler was called"
    notes.unlink()
    assert 5 < run(RANDOM_STEPS) <= count
    assert set(notes.read_text().split("\n")) == {"--version", ""}

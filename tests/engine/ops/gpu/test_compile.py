"""Every kernel compiles for a Hopper GPU (sm_90), and fits into its registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.ops.gpu.compile_kernels import CASES

SHARED_BYTES = 227 * 1024  # of one streaming multiprocessor
STACK_BYTES = 32  # of spilled registers; a few are harmless


def compiled(*cases: str) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.ops.gpu.compile_kernels", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in kernels:
        assert kernel["stack"] <= STACK_BYTES, f"spills registers: {kernel}"
        assert kernel["shared"] <= SHARED_BYTES, kernel
    return kernels


def kinds(kernels: list[dict]) -> set[str]:
    return {kernel["kernel"] for kernel in kernels}


def test_kernels_of_a_common_model_compile_for_hopper():
    kernels = compiled("rows", "chunk", "elementwise")
    expected = {
        "attend_kernel",
        "join_kernel",
        "rotate_and_write_kernel",
        "rms_norm_kernel",
        "gated_kernel",
        "draw_kernel",
        "quantize_kernel",
    }
    assert kinds(kernels) == expected
    rows, chunk = (kernel for kernel in kernels if kernel["kernel"] == "attend_kernel")
    assert rows["mma"] and chunk["wgmma"], "attention multiplies on tensor cores"
    assert rows["async_copies"] and chunk["async_copies"], "K and V are fetched ahead"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_attention_of_every_shape_compiles_for_hopper(part):
    cases = list(CASES)[part::4]
    kernels = compiled(*cases)
    assert sum(kernel["kernel"] == "attend_kernel" for kernel in kernels) == len(cases)

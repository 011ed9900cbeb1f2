"""Every kernel compiles for a Hopper GPU (sm_90), and fits into its registers and shared memory.

The slow tests compile all for sm_80, 89, 90 and 100. With another Triton, such as that of the GPU's torch:

    python3 -m pip install --no-deps --target /tmp/triton triton==3.6.0
    PYTHONPATH=/tmp/triton:. pytest -m slow tests/engine/model/ops/gpu/test_compile.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.model.ops.gpu.compile_kernels import CASES, EXPERTS, PACKED_EXPERTS

SHARED_BYTES = 227 * 1024  # of one streaming multiprocessor
SMALL_SHARED_BYTES = 99 * 1024  # of the smallest ones since Ampere
SHARED = {"sm_80": SMALL_SHARED_BYTES, "sm_89": SMALL_SHARED_BYTES, "sm_90": SHARED_BYTES, "sm_100": SHARED_BYTES}
"""Shared memory by GPU. Those of sm_80 have more, but take the tiles of sm_86 and sm_89."""
ROUTING = {
    "top_k_softmax_kernel", "top_k_of_groups_kernel", "count_kernel", "order_kernel", "combine_kernel",
    "add_shared_kernel",
}  # fmt: skip
DEPENDENT = {
    "attend_kernel", "rotate_and_write_kernel", "rms_norm_kernel", "gated_kernel", "swigluoai_kernel",
    "open_gate_kernel",
    "norm_quantize_kernel", "gated_quantize_kernel", "quantize_kernel",
    "grouped_kernel", "best_of_segment_kernel", "best_of_row_kernel", "mask_kernel", "penalise_kernel",
    *ROUTING,
}  # fmt: skip
"""Kernels that are launched before the one before them has ended, from Hopper on."""
STACK_BYTES = 64  # of spilled registers; a few are harmless
SPILLS = {"linear_attention_kernel": 2048}  # holds a state and a chunk's keys; what that costs a card has to show


def compiled(*cases: str) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.model.ops.gpu.compile_kernels", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in kernels:
        in_float32 = not (kernel["mma"] or kernel["wgmma"])  # products without tensor cores, which only tests use
        assert kernel["stack"] <= SPILLS.get(kernel["kernel"], STACK_BYTES) or in_float32, f"spills registers: {kernel}"
        assert kernel["shared"] <= SHARED_BYTES, kernel
    return kernels


def kinds(kernels: list[dict]) -> set[str]:
    return {kernel["kernel"] for kernel in kernels}


@pytest.mark.slow
def test_kernels_of_common_models_compile_for_hopper():
    kernels = compiled("rows", "chunk", "elementwise", "experts")
    expected = {
        "attend_kernel",
        "plan_kernel",
        "rotate_and_write_kernel",
        "rms_norm_kernel",
        "gated_kernel",
        "swigluoai_kernel",
        "open_gate_kernel",
        "best_of_segment_kernel",
        "best_of_row_kernel",
        "mask_kernel",
        "penalise_kernel",
        "grouped_kernel",
        *ROUTING,
        "quantize_kernel",
        "norm_quantize_kernel",
        "gated_quantize_kernel",
    }
    assert kinds(kernels) == expected
    assert {kernel["kernel"] for kernel in kernels if kernel["dependent"]} == DEPENDENT
    rows, chunk = (kernel for kernel in kernels if kernel["kernel"] == "attend_kernel")
    assert rows["mma"] and chunk["wgmma"], "attention multiplies on tensor cores"
    assert rows["async_copies"] and chunk["async_copies"], "K and V are fetched ahead"
    products = [kernel for kernel in kernels if kernel["kernel"] == "grouped_kernel"]
    assert products[0]["mma"] and products[-1]["wgmma"], "few rows and many rows are multiplied on tensor cores"
    assert all(kernel["async_copies"] and kernel["shared"] <= SMALL_SHARED_BYTES for kernel in products)


@pytest.mark.slow
def test_kernels_of_recurrent_layers_and_of_latent_attention_compile_for_hopper():
    kernels = compiled("recurrent", "latent")
    recurrent = {
        "causal_conv_kernel",
        "gates_kernel",
        "linear_attention_kernel",
        "keep_kernel",
        "gated_rms_norm_kernel",
    }
    assert kinds(kernels) == {
        *recurrent,
        "latent_kernel",
        "plan_kernel",
        "write_kernel",
        "rotate_and_write_latent_kernel",
    }
    assert all(kernel["mma"] or kernel["wgmma"] for kernel in kernels if kernel["kernel"] == "latent_kernel")


@pytest.mark.slow
def test_kernels_of_adapters_compile_for_hopper():
    kernels = compiled("adapters")
    assert kinds(kernels) == {"shrink_kernel", "expand_kernel"}
    assert all(kernel["mma"] or kernel["wgmma"] for kernel in kernels), "they multiply on tensor cores"


@pytest.mark.slow
def test_the_experts_kernel_compiles_for_ampere_and_attention_fits_into_smaller_cards():
    kernels = compiled("sm_80", "experts", "sm_89", "chunk")
    (small_chunk,) = (kernel for kernel in kernels if kernel["kernel"] == "attend_kernel")
    assert small_chunk["shared"] <= SMALL_SHARED_BYTES, "it fits into an L4 or an RTX card"
    products = [kernel for kernel in kernels if kernel["kernel"] == "grouped_kernel"]
    assert products[0]["mma"] and products[-1]["mma"]
    assert all(kernel["async_copies"] and kernel["shared"] <= SMALL_SHARED_BYTES for kernel in products)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_the_other_kernels_compile_for_every_gpu_and_in_every_dtype(target):
    kernels = compiled(target, "elementwise", *EXPERTS, *(f"experts in {kind}" for kind in PACKED_EXPERTS))
    assert all(kernel["shared"] <= SHARED[target] for kernel in kernels)
    assert target in ("sm_90", "sm_100") or not any(kernel["dependent"] for kernel in kernels)
    assert {"grouped_kernel", "gated_kernel", "swigluoai_kernel", "best_of_row_kernel", *ROUTING} <= kinds(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
@pytest.mark.parametrize("part", range(4))
def test_attention_of_every_shape_compiles_and_fits_into_the_shared_memory(part, target):
    """In bfloat16, float16, float32 and float8, which no GPU before sm_89 has."""
    cases = [name for name in CASES if target != "sm_80" or "float8" not in name][part::4]
    kernels = compiled(target, *cases)
    assert all(kernel["shared"] <= SHARED[target] for kernel in kernels)
    assert sum(kernel["kernel"] == "attend_kernel" for kernel in kernels) == len(cases)

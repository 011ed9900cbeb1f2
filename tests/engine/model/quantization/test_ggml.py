"""Blocks of ggml, against the NumPy code of the package `gguf`."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.checkpoint.gguf import entry
from engine.model.quantization.ggml import TYPES, unpack

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
          "Q3_K": (108,), "Q2_K": (80, 82)}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_block_has_the_numbers_that_gguf_gives(name, seed):
    rng, kind = np.random.default_rng(seed), TYPES[name]
    blocks = rng.integers(0, 256, (3, 2, kind.bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(0, 200, (3, 2))  # exponents with which nothing overflows
    for at in HALVES.get(name, (0,)):  # any finite half, and 0
        halves = (rng.normal(0, 1, (3, 2, 1)) * rng.integers(0, 2, (3, 2, 1))).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(3, -1), gguf.GGMLQuantizationType[name])
    weight = unpack(torch.from_numpy(blocks), name)
    assert weight.group_size == kind.group and weight.bits == kind.bits
    assert -(1 << kind.bits - 1) <= int(weight.values.min()) <= int(weight.values.max()) < 1 << kind.bits - 1
    # with a minimum the sum is rounded elsewhere
    torch.testing.assert_close(
        weight.dequantize(torch.float32), torch.from_numpy(expected), rtol=0, atol=2e-7 * abs(expected).max() + 1e-30
    )


def test_sizes_of_blocks_are_those_of_gguf():
    for name, sizes in entry.TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes
    assert {name: (kind.numbers, kind.bytes) for name, kind in TYPES.items()}.items() <= entry.TYPES.items()

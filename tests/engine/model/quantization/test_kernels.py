"""What multiplies quantized weights on a CPU, against the plain product of what they stand for."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.layers.linear import ColumnParallelLinear
from engine.model.ops import quantized_linear
from engine.model.ops.cpu.quantized_linear import MANY_ROWS, Int4, Int8, onednn_int8
from engine.model.quantization.eight_bit import EightBit
from engine.model.quantization.packed_int import AWQ
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import Shard
from tests.engine.model.layers.sharding import load
from tests.engine.model.quantization import checkpoints
from tests.engine.model.quantization.checkpoints import FP8

PROFILE = settings(max_examples=40, deadline=None, derandomize=True)
NEEDS_VNNI = pytest.mark.skipif(not onednn_int8(), reason="this CPU has no VNNI")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.05, "rtol": 0.03}}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weight(outputs: int, inputs: int, bits: int, groups: int, *, zeros: bool, activations: torch.dtype | None = None):
    generator = torch.Generator().manual_seed(outputs + inputs)
    most = 1 << bits - 1
    values = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scale = (torch.rand(outputs, groups, generator=generator) + 0.5) / most / inputs**0.5
    zero = torch.randint(-most, most, (outputs, groups), generator=generator).float() if zeros else None
    return QuantizedWeight(values, scale, zero, bits, activations)


@PROFILE
@given(
    rows=st.sampled_from([1, 2, 7, 40, MANY_ROWS - 1, MANY_ROWS, 200]),
    outputs=st.sampled_from([1, 2, 5, 65]),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 128, 256]),
    zeros=st.booleans(),
    bias=st.booleans(),
    dtype=DTYPES,
)
def test_int4_equals_plain(rows, outputs, groups, group_size, zeros, bias, dtype):
    w = weight(16 * outputs, groups * group_size, 4, groups, zeros=zeros)
    multiply = quantized_linear.select(w, dtype)
    assert isinstance(multiply, Int4)
    x, b = randn(rows, groups * group_size, dtype=dtype), randn(16 * outputs, dtype=dtype) if bias else None
    torch.testing.assert_close(multiply(x, b), quantized_linear.plain(x, w, b), **TOLERANCE[dtype])


@NEEDS_VNNI
@PROFILE
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 150),
    bias=st.booleans(),
    dtype=DTYPES,
)
def test_int8_equals_plain(rows, outputs, inputs, bias, dtype):
    w = weight(outputs, inputs, 8, 1, zeros=False, activations=torch.int8)
    multiply = quantized_linear.select(w, dtype)
    assert isinstance(multiply, Int8)
    x, b = randn(rows, inputs, dtype=dtype), randn(outputs, dtype=dtype) if bias else None
    torch.testing.assert_close(multiply(x, b), quantized_linear.plain(x, w, b), **TOLERANCE[dtype])


@NEEDS_VNNI
def test_each_row_has_its_own_scale_whatever_its_neighbours_are():
    multiply = quantized_linear.select(weight(32, 64, 8, 1, zeros=False, activations=torch.int8), torch.float32)
    small, large = randn(1, 64), randn(1, 64) * 1e4
    together = multiply(torch.cat([small, large]), None)
    torch.testing.assert_close(together[:1], multiply(small, None), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("w", "said"),
    [
        (weight(32, 64, 8, 1, zeros=True, activations=torch.int8), "int8 x int8, a scale per output: no kernel on cpu"),
        (weight(32, 64, 8, 2, zeros=False), "int8, a scale per 32 inputs: no kernel on cpu, dequantized to float32"),
        (weight(32, 48, 4, 3, zeros=False), "int4, a scale per 16 inputs: no kernel on cpu, dequantized to float32"),
        (weight(32, 64, 4, 2, zeros=False), "int4, a scale per 32 inputs: multiplied as it is on cpu (Int4)"),
    ],
)
def test_one_log_line_says_what_a_kind_of_weight_becomes(caplog, w, said):
    quantized_linear.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="engine.model.ops.quantized_linear"):
        quantized_linear.select(w, torch.float32)
        quantized_linear.select(w, torch.float32)
    assert [record.getMessage().startswith(f"quantized linear layers of {said}") for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("format", "quantize"),
    [
        (EightBit(FP8, (None, None), "weight_scale", False, FP8), checkpoints.fp8(input_scale=torch.ones(1))),
        (EightBit(FP8, (16, 16), "weight_scale_inv", False, FP8), checkpoints.fp8((16, 16), name="weight_scale_inv")),
        (AWQ(4, 32), checkpoints.awq(32)),
    ],
)
@torch.inference_mode()
def test_weights_of_a_merged_layer_keep_their_own_scales(format, quantize):
    weights = {"a": randn(24, 64), "b": randn(8, 64) * 1000}
    tensors, meant = {}, []
    for name, weight in weights.items():
        stored, dequantized = quantize(weight)
        tensors |= {f"{name}.{ending}": tensor for ending, tensor in stored.items()}
        meant.append(dequantized)
    outputs = {name: Shard((len(weight),), 0, 0, len(weight)) for name, weight in weights.items()}
    layer = load(ColumnParallelLinear(64, outputs, format=format), tensors)
    layer.pack()
    x = randn(3, 64)
    torch.testing.assert_close(layer(x), x @ torch.cat(meant).T, atol=1e-3, rtol=1e-4)

"""What multiplies quantized weights on a CPU, against the plain product of what they stand for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types
from numba.extending import intrinsic

from engine.model.layers.linear import ColumnParallelLinear
from engine.model.layers.recurrent.gated_delta_net import GroupedLinear
from engine.model.ops import quantized_linear
from engine.model.ops.cpu.integers import I8P, add_quads_avx2, add_quads_plain, as_i8, has_avx2
from engine.model.ops.cpu.quantized_linear import Integers
from engine.model.ops.cpu.vector import VI32
from engine.model.quantization.eight_bit import EightBit
from engine.model.quantization.packed_int import AWQ
from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import Shard
from tests.engine.model.layers.sharding import load
from tests.engine.model.quantization import checkpoints
from tests.engine.model.quantization.checkpoints import FP8

PROFILE = settings(max_examples=20, derandomize=True)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: {"atol": 1e-3, "rtol": 1e-3}, torch.bfloat16: {"atol": 0.05, "rtol": 0.03}}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weight(outputs: int, inputs: int, bits: int, groups: int, *, zeros: bool, activations: torch.dtype | None = None):
    generator = torch.Generator().manual_seed(outputs + inputs)
    most = 1 << bits - 1
    values = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scale = (torch.rand(outputs, groups, generator=generator) + 0.5) / most / inputs**0.5
    zero = 2 * most * (torch.rand(outputs, groups, generator=generator) - 0.5) if zeros else None
    return QuantizedWeight(values, scale, zero, bits, activations)


@PROFILE
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.sampled_from([1, 2, 6, 7, 100]),
    outputs=st.integers(1, 200),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([8, 16, 32, 64, 128]),
    zeros=st.booleans(),
    bias=st.booleans(),
)
def test_weights_alone_are_multiplied_by_inputs_rounded_by_groups(bits, rows, outputs, groups, group_size, zeros, bias):
    w = weight(outputs, groups * group_size, bits, groups, zeros=zeros)
    multiply = quantized_linear.select(w, torch.bfloat16)
    assert isinstance(multiply, Integers)
    x, b = randn(rows, w.values.shape[1], dtype=torch.bfloat16), randn(outputs).bfloat16() if bias else None
    expected = quantized_linear.plain(x, replace(w, activations=torch.int8), b)
    torch.testing.assert_close(multiply(x, b), expected, **TOLERANCE[torch.bfloat16])


@PROFILE
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 150),
    zeros=st.booleans(),
    bias=st.booleans(),
    dtype=DTYPES,
)
def test_int8_by_int8_equals_plain(rows, outputs, inputs, zeros, bias, dtype):
    w = weight(outputs, inputs, 8, 1, zeros=zeros, activations=torch.int8)
    multiply = quantized_linear.select(w, dtype)
    assert isinstance(multiply, Integers)
    x, b = randn(rows, inputs, dtype=dtype), randn(outputs, dtype=dtype) if bias else None
    torch.testing.assert_close(multiply(x, b), quantized_linear.plain(x, w, b), **TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_alone_with_one_scale_have_inputs_with_one_for_each_128(bits):
    w = weight(70, 384, bits, 1, zeros=False)
    x = randn(3, 384).bfloat16()
    x[:, 0] = 1000  # with one scale the others would be all but lost
    by_groups = replace(w, scale=w.scale.expand(-1, 3), activations=torch.int8)
    expected = quantized_linear.plain(x, by_groups)
    torch.testing.assert_close(quantized_linear.select(w, torch.bfloat16)(x, None), expected, atol=0.1, rtol=0.01)


@pytest.mark.parametrize(("bits", "groups"), [(8, 1), (8, 2), (4, 2)])
def test_a_row_has_the_same_bits_beside_any_others(bits, groups):
    multiply = quantized_linear.select(weight(130, 256, bits, groups, zeros=True), torch.bfloat16)
    x = randn(205, 256).bfloat16() * torch.logspace(-3, 3, 205).bfloat16()[:, None]
    together = multiply(x, None)
    for rows in (slice(0, 1), slice(3, 9), slice(7, 8), slice(90, 120)):
        assert torch.equal(multiply(x[rows], None), together[rows])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_leaves_the_others_alone(groups, broken):
    multiply = quantized_linear.select(weight(64, 256, 8, groups, zeros=True), torch.bfloat16)
    x = randn(8, 256).bfloat16()
    expected = multiply(x, None)
    x[3, 200] = broken
    found = multiply(x, None)
    assert not found[3].isfinite().any()
    others = [row for row in range(8) if row != 3]
    assert torch.equal(found[others], expected[others])


def test_a_row_of_a_wider_tensor_is_read_where_it_lies():
    multiply = quantized_linear.select(weight(64, 32, 8, 1, zeros=False, activations=torch.int8), torch.bfloat16)
    x = randn(9, 96).bfloat16()[:, 32:64]
    assert torch.equal(multiply(x, None), multiply(x.contiguous(), None))


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("add_quads", [add_quads_plain, add_quads_avx2])
def test_a_cpu_without_vnni_has_the_same_sums(add_quads, kind):
    if add_quads is add_quads_avx2 and (not has_avx2 or kind is np.uint8):
        pytest.skip("AVX2 multiplies signed bytes so, where it is needed")
    options = {"signed": True} if add_quads is add_quads_plain and kind is np.int8 else {}

    @intrinsic
    def add_four_products(_: Any, total: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            vectors = [builder.bitcast(pointer, VI32.as_pointer()) for pointer in args]
            sums = add_quads(builder, *(builder.load(vector, align=1) for vector in vectors), **options)
            builder.store(sums, vectors[0], align=1)
            return context.get_dummy_value()

        return types.void(I8P, I8P, I8P), generate

    generator, ends = np.random.default_rng(0), np.iinfo(kind)
    a, b = generator.integers(ends.min, ends.max + 1, 64, kind), generator.integers(-127, 128, 64, np.int8)
    a[:8], a[8:16], b[:4], b[4:8], b[8:16] = ends.max, ends.min, 127, -127, 127
    out = np.arange(16, dtype=np.int32)

    @njit
    def run(total, first, second):
        add_four_products(as_i8(total), as_i8(first), as_i8(second))

    run(out.ctypes.data, a.ctypes.data, b.ctypes.data)
    expected = (a.astype(np.int64) * b).reshape(16, 4).sum(1) + np.arange(16)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("w", "said"),
    [
        (
            weight(32, 64, 8, 1, zeros=True, activations=torch.int8),
            "int8 x int8, a scale per output: multiplied in quantized form",
        ),
        (weight(32, 64, 8, 2, zeros=False), "int8, a scale per 32 inputs: no kernel on cpu, dequantized to float32"),
        (weight(32, 64, 4, 2, zeros=False), "int4, a scale per 32 inputs: no kernel on cpu, dequantized to float32"),
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


GROUPED = [
    (EightBit(FP8, (16, 16), "weight_scale_inv", False, FP8), checkpoints.fp8((16, 16), name="weight_scale_inv")),
    (AWQ(4, 32), checkpoints.awq(32)),
    (None, lambda weight: ({"weight": weight}, weight)),
]


@pytest.mark.parametrize(("format", "quantize"), GROUPED)
@torch.inference_mode()
def test_grouped_outputs_of_a_checkpoint_are_put_side_by_side_when_they_are_packed(format, quantize):
    widths, groups = (8, 8, 24), 2  # blocks of 16 rows hold rows of several parts
    stored, meant = quantize(randn(groups * sum(widths), 64))
    outputs = {"": Shard((len(meant),), 0, 0, len(meant))}
    layer = load(GroupedLinear(64, outputs, widths, groups, format), stored)
    layer.pack()
    x = randn(3, 64)
    first, second = (x @ meant.T).split(sum(widths), dim=1)
    expected = [part for pair in zip(first.split(widths, 1), second.split(widths, 1), strict=True) for part in pair]
    torch.testing.assert_close(layer(x), torch.cat(expected, dim=1), atol=1e-3, rtol=1e-4)

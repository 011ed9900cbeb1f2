"""Packing, and what a rank makes of its shard of a stored weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.quantization.eight_bit import EightBit
from engine.model.quantization.format import StoredWeight, WeightFormat
from engine.model.quantization.packed_int import AWQ, GPTQ, PackQuantized
from engine.model.quantization.packing import AWQ_NIBBLES, unpack
from engine.model.quantization.weight import QuantizedWeight, quantize_rows
from engine.model.shard import INPUTS, OUTPUTS, Shard
from tests.engine.model.layers.sharding import WholeTensor
from tests.engine.model.quantization import checkpoints
from tests.engine.model.quantization.checkpoints import FP8

PROFILE = settings(max_examples=40, derandomize=True)
FORMATS = {
    "fp8_blocks": (
        EightBit(FP8, (5, 12), "weight_scale_inv", False, FP8),
        checkpoints.fp8((5, 12), name="weight_scale_inv"),
    ),
    "awq": (AWQ(4, 16), checkpoints.awq(16)),
    "gptq": (GPTQ(4, 16), checkpoints.gptq(group=16, symmetric=False)),
    "gptq_desc_act": (GPTQ(4, 16, ordered=True), checkpoints.gptq(group=16, ordered=True)),
    "ct_int4": (PackQuantized(4, 16, zeros=True), checkpoints.pack_quantized(4, 16, False)),
}


@PROFILE
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 5),
    words=st.integers(1, 4),
    dim=st.sampled_from([0, 1]),
    seed=st.integers(0, 1000),
)
def test_unpack_gives_back_what_was_packed(bits, rows, words, dim, seed):
    shape = (rows, words * 32 // bits)
    values = torch.randint(1 << bits, shape, generator=torch.Generator().manual_seed(seed))
    if dim == 0:
        values = values.T
    assert torch.equal(unpack(checkpoints.pack(values, bits, dim), bits, dim).long(), values)


def test_unpack_finds_awq_columns_where_its_kernel_wants_them():
    word = torch.tensor([[0x75316420]], dtype=torch.int32)  # AutoAWQ's order [0, 2, 4, 6, 1, 3, 5, 7], lowest first
    assert unpack(word, 4, 1, AWQ_NIBBLES).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_word_with_the_sign_bit_set_is_unsigned_all_the_same():
    assert unpack(torch.tensor([[-1]], dtype=torch.int32), 8, 1).tolist() == [[255] * 4]


def decode(format: WeightFormat, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
    stored = StoredWeight({"": weight}, format)
    for name, (shard, target) in stored.shards.items():
        assert (tuple(tensors[name].shape) or (1,)) == shard.shape
        shard.load(WholeTensor(tensors[name]), target)
    return stored.decode()


@pytest.mark.parametrize("name", FORMATS)
@PROFILE
@given(dim=st.sampled_from([OUTPUTS, INPUTS]), start=st.integers(0, 63), size=st.integers(1, 64))
def test_any_rows_or_columns_are_those_of_the_whole_weight(name, dim, start, size):
    format, quantize = FORMATS[name]
    outputs, inputs = (64, 32) if dim == OUTPUTS else (16, 64)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    tensors, meant = quantize(weight)
    size = min(size, weight.shape[dim] - start)
    own = decode(format, tensors, Shard((outputs, inputs), dim, start, size)).dequantize(torch.float32)
    torch.testing.assert_close(own, meant.narrow(dim, start, size), atol=1e-6, rtol=1e-6)


def test_groups_that_a_rank_holds_whole_stay_groups_and_others_become_single_columns():
    tensors, _ = checkpoints.awq(16)(torch.randn(8, 64))
    format = AWQ(4, 16)
    assert decode(format, tensors, Shard((8, 64), INPUTS, 32, 32)).group_size == 16
    assert decode(format, tensors, Shard((8, 64), INPUTS, 24, 8)).group_size == 8, "all of one group"
    assert decode(format, tensors, Shard((8, 64), INPUTS, 24, 24)).group_size == 1


def test_a_symmetric_weight_has_no_zero_points():
    symmetric, _ = checkpoints.gptq(group=16)(torch.randn(8, 32))
    other, _ = checkpoints.gptq(group=16, symmetric=False)(torch.randn(8, 32))
    shard = Shard((8, 32), OUTPUTS, 0, 8)
    assert decode(GPTQ(4, 16), symmetric, shard).zero is None
    assert decode(GPTQ(4, 16), other, shard).zero is not None


@PROFILE
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    size=st.sampled_from([1, 8]),
    power=st.integers(-20, 20),
    dtype=st.sampled_from([FP8, torch.int8]),
)
def test_rounded_rows_are_within_half_a_step_and_never_nan(rows, groups, size, power, dtype):
    x = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(rows)) * 2.0**power
    x[0, 0] = 0.0
    values, scale = quantize_rows(x, dtype, size)
    back = (values.float().unflatten(1, (groups, size)) * scale[..., None]).flatten(1)
    most = x.unflatten(1, (groups, size)).abs().amax(-1, keepdim=True).expand(-1, -1, size).flatten(1)
    # FP8 has three bits after the first one, and below 2^-6 fixed steps; int8 has equal steps
    allowed = torch.maximum(x.abs() / 16, most / 448 * 2**-10) if dtype == FP8 else most / 127 / 2
    assert ((back - x).abs() <= allowed * 1.001 + 1e-12).all()


def test_a_row_of_zeros_stays_zero():
    for dtype in (FP8, torch.int8):
        values, scale = quantize_rows(torch.zeros(2, 4), dtype)
        assert (values.float() == 0).all()
        assert scale.isfinite().all()

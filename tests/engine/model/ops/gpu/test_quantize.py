from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.ops.gpu.quantize import quantize_rows
from engine.model.quantization import weight
from engine.model.quantization.weight import FP8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    size=st.sampled_from([1, 16, 48, 128]),
    power=st.integers(-12, 12),
    grouped=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    into=st.sampled_from([FP8, torch.int8]),
)
def test_rows_are_rounded_as_by_plain_torch(rows, groups, size, power, grouped, dtype, into):
    generator = torch.Generator().manual_seed(rows + groups)
    merged = (torch.randn(rows, groups * size + 5, generator=generator) * 2.0**power).to(DEVICE, dtype)
    x = merged[:, : groups * size]
    x[0, 0] = 0.0
    values, scale = (part.cpu() for part in quantize_rows(x, into, size if grouped else None))
    # on the CPU: on a GPU torch divides by a plain number as it multiplies with 1 / number, which rounds differently
    expected, expected_scale = weight.quantize_rows(x.cpu(), into, size if grouped else None)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("into", [FP8, torch.int8])
def test_rows_of_zeros_stay_zero(into):
    values, scale = quantize_rows(torch.zeros(3, 32, device=DEVICE), into)
    assert (values.float() == 0).all()
    assert (scale > 0).all()

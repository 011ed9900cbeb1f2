from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.ops import quantized_linear
from engine.model.ops.gpu import activation, fused_quantize, norm, quantize
from engine.model.ops.gpu import quantized_linear as gpu_linear
from engine.model.ops.gpu.quantize import quantize_rows
from engine.model.ops.gpu.quantized_linear import BlockFP8, Int8, RowFP8
from engine.model.quantization import weight
from engine.model.quantization.rows import QuantizedRows, RowFormat
from engine.model.quantization.weight import FP8, QuantizedWeight
from tests.products import each_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, derandomize=True)
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


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_blocks_are_rounded_in_one_launch_as_cublas_wants_them(rows):
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.bfloat16)
    values, scale, *_ = quantize.quantize(x, RowFormat(FP8, 128))
    expected, expected_scale = quantize_rows(x, FP8, 128)
    assert len(values) % 4 == 0 and len(values) - rows < 4
    assert torch.equal(values[:rows].view(torch.int8), expected.view(torch.int8))
    assert not values[rows:].float().any()
    assert torch.equal(scale[:rows], expected_scale) and scale.stride() == (1, len(values))


@pytest.mark.parametrize("into", [FP8, torch.int8])
def test_rows_of_zeros_stay_zero(into):
    values, scale = quantize_rows(torch.zeros(3, 32, device=DEVICE), into)
    assert (values.float() == 0).all()
    assert (scale > 0).all()


def make_weight(bits: int, outputs: int, inputs: int, groups: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs)
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (outputs, inputs), generator=generator, dtype=torch.int8)
    scale = torch.rand(outputs, groups, generator=generator) / limit + 0.01
    return QuantizedWeight(values.to(DEVICE), scale.to(DEVICE), None, bits, torch.int8 if bits == 8 else None)


@pytest.mark.parametrize(
    ("rows", "bias"),
    each_once(
        [1, 31, 40],
        [None, torch.full((48,), 3.0, dtype=torch.bfloat16, device=DEVICE)],
    ),
)
def test_a_product_of_int8_equals_plain(rows, bias):
    packed = make_weight(8, 48, 72, 1)
    x = torch.randn(rows, 72, generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.bfloat16)
    torch.testing.assert_close(Int8(packed)(x, bias), quantized_linear.plain(x, packed, bias), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_weight_of_four_bits_is_dequantized_at_load(groups, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu_linear.select(make_weight(4, 40, 256, groups), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("capability", "kind"),
    [((8, 0), None), ((8, 9), RowFP8), ((9, 0), BlockFP8), ((10, 0), RowFP8), ((12, 0), RowFP8)],
)
def test_float8_in_blocks_keeps_its_eight_bits_on_every_card_that_multiplies_them(monkeypatch, capability, kind):
    """Where cuBLAS has no product for blocks, weights get one scale per output, and hardly differ."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(2, 2, generator=generator).repeat_interleave(128, dim=0) / 100 + 0.001
    values = torch.randn(256, 256, generator=generator).mul(100).clamp(-448, 448).to(FP8)
    packed = QuantizedWeight(values, scale, None, 8, FP8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gpu_linear, "cuda_version", lambda: (13, 0))
    chosen = gpu_linear.select(packed, torch.bfloat16)
    assert type(chosen) is (type(None) if kind is None else kind)
    if kind is RowFP8:
        assert chosen.values.dtype == FP8
        found, expected = chosen.values.T.float() * chosen.scale.T, packed.dequantize(torch.float32)
        assert (found - expected).norm() < 0.04 * expected.norm()


FORMATS = {"float8": RowFormat(FP8), "float8 in groups": RowFormat(FP8, 128), "int8": RowFormat(torch.int8)}


def assert_same_rows(found: QuantizedRows, expected: QuantizedRows) -> None:
    assert found.scale.stride() == expected.scale.stride() and found[2:] == expected[2:]
    if DEVICE == "cpu":
        assert torch.equal(found.values.view(torch.int8), expected.values.view(torch.int8))
        assert torch.equal(found.scale, expected.scale)
    else:  # sums of another order may round a number to its neighbour
        found_rows, rows = (
            (part.values.float().unflatten(1, (part.scale.shape[1], -1)) * part.scale[..., None]).flatten(1)
            for part in (found, expected)
        )
        torch.testing.assert_close(found_rows, rows, atol=2e-2 * float(rows.abs().max()), rtol=0.13)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("rows", "size", "shift"), [(1, 128, 0.0), (5, 384, 0.0), (3, 1024, 1.0)])
def test_a_norm_quantizes_its_result_as_a_kernel_of_its_own(format, rows, size, shift):
    generator = torch.Generator().manual_seed(rows)
    merged = torch.randn(rows, 2, size + 3, generator=generator).to(DEVICE, torch.bfloat16)
    (x, y), weight = merged[..., :size].unbind(1), torch.rand(size, generator=generator).to(DEVICE, torch.bfloat16)
    total, normed = norm.add_rms_norm(x, y, weight, 1e-6, shift)
    found_total, found = fused_quantize.add_rms_norm(x, y, weight, 1e-6, shift, format)
    assert torch.equal(found_total, total)
    assert_same_rows(found, quantize.quantize(normed, format))
    normed = norm.rms_norm(x, weight, 1e-6, shift)
    assert_same_rows(fused_quantize.rms_norm(x, weight, 1e-6, shift, format), quantize.quantize(normed, format))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", fused_quantize.GATED)
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (5, 384), (2, 1408)])
def test_an_activation_quantizes_its_result_as_a_kernel_of_its_own(format, name, rows, size):
    x = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.bfloat16) * 4
    expected = quantize.quantize(activation.GATED[name](x), format)
    assert_same_rows(fused_quantize.GATED[name](x, format), expected)

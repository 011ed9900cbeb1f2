"""Products with quantized weights on a GPU, against the plain product of what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.ops import quantized_linear
from engine.model.quantization.weight import FP8, QuantizedWeight, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OUTPUTS, INPUTS = 512, 1024


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def fp8_rows() -> QuantizedWeight:
    return QuantizedWeight(*quantize_rows(randn(OUTPUTS, INPUTS), FP8), None, 8, FP8)


def fp8_blocks() -> QuantizedWeight:
    weight = randn(OUTPUTS, INPUTS)
    blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    scale = blocks.repeat_interleave(128, 0)
    values = (weight.unflatten(1, (-1, 128)) / scale[..., None]).flatten(1).to(FP8)
    return QuantizedWeight(values, scale, None, 8, FP8)


def int8() -> QuantizedWeight:
    return QuantizedWeight(*quantize_rows(randn(OUTPUTS, INPUTS), torch.int8), None, 8, torch.int8)


WEIGHTS = {
    "RowFP8": fp8_rows,
    "BlockFP8": fp8_blocks,
    "Int8": int8,
}


def kernel_for(name: str) -> tuple[QuantizedWeight, quantized_linear.Multiply]:
    weight = WEIGHTS[name]()
    multiply = quantized_linear.select(weight, torch.bfloat16)
    if name.endswith("FP8") and multiply is None:
        pytest.skip(f"no {name} on this GPU")
    assert type(multiply).__name__ == name
    return weight, multiply


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 256])
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_a_product_equals_plain(name, rows, biased):
    weight, multiply = kernel_for(name)
    x = randn(rows, INPUTS, seed=rows).bfloat16()
    bias = randn(OUTPUTS, seed=1).bfloat16() * 10 if biased else None
    found, expected = multiply(x, bias).float(), quantized_linear.plain(x, weight, bias).float()
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 0.01, "what bfloat16 rounds, and no more"


@pytest.mark.parametrize("name", WEIGHTS)
@torch.inference_mode()
def test_a_captured_product_follows_its_input(name):
    weight, multiply = kernel_for(name)
    x = randn(8, INPUTS).bfloat16()
    multiply(x, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply(x, None)
    x.copy_(randn(8, INPUTS, seed=2))
    graph.replay()
    expected = multiply(x, None)
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.02)
    torch.testing.assert_close(out, quantized_linear.plain(x, weight), atol=2.0, rtol=0.05)


@torch.inference_mode()
def test_fp8_is_as_close_to_bfloat16_as_its_three_bits_allow():
    """Side by side: the rounding of weights and inputs to FP8 is all that the fast product adds."""
    exact = randn(OUTPUTS, INPUTS)
    weight = QuantizedWeight(*quantize_rows(exact, FP8), None, 8, FP8)
    multiply = quantized_linear.select(weight, torch.bfloat16)
    if multiply is None:
        pytest.skip("no FP8 on this GPU")
    x = randn(64, INPUTS, seed=3).bfloat16()
    found, expected = multiply(x, None).float(), x.float() @ exact.T
    assert (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt() < 0.05

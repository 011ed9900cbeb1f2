from __future__ import annotations

import pytest
import torch

from engine.model.layers.norm import RMSNorm
from engine.model.models.gemma3 import GemmaRMSNorm
from tests.engine.model.layers.sharding import load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_computes_in_float32_and_keeps_the_dtype(dtype):
    weight = torch.randn(16)
    norm = load(RMSNorm(16, 1e-6), {"weight": weight}).to(dtype)
    x = (torch.randn(3, 16) * 100).to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    expected = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.to(dtype).double()
    torch.testing.assert_close(out.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_gemma_norm_with_zero_weight_scales_by_one():
    norm = load(GemmaRMSNorm(16, 1e-6), {"weight": torch.zeros(16)})
    out = norm(torch.randn(3, 16))
    torch.testing.assert_close(out.square().mean(-1), torch.ones(3))

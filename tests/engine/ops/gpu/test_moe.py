"""Grouped products, for which torch has a version on a CPU too, against one expert after the other."""

from __future__ import annotations

import pytest
import torch

from engine.ops import activation, moe
from engine.ops.gpu import moe as gpu_moe
from tests.engine.ops.gpu.paged import DEVICE


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize(("tokens", "num_experts", "k"), [(1, 8, 2), (50, 4, 3), (3, 16, 1), (7, 2, 2)])
def test_grouped_experts_equal_plain(tokens, num_experts, k):
    x, gate_up, down = randn(tokens, 32), randn(num_experts, 48, 32), randn(num_experts, 32, 24)
    weights, experts = randn(tokens, num_experts).softmax(-1).topk(k)
    arguments = (x, gate_up, down, activation.silu_mul, experts, weights)
    assert gpu_moe.fits(x, down)
    expected = moe.mix_experts_plain(*arguments)
    torch.testing.assert_close(gpu_moe.mix_experts(*arguments), expected, atol=0.3, rtol=2e-2)


def test_odd_sizes_and_other_types_are_left_to_the_plain_version():
    assert not gpu_moe.fits(randn(2, 32), randn(4, 32, 20))
    assert not gpu_moe.fits(randn(2, 32).float(), randn(4, 32, 24))

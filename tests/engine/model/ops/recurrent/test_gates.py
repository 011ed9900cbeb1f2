"""What surrounds linear attention, on a CPU: close to plain torch, and a row's bits beside any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.ops.elementwise import activations, norms
from engine.model.ops.elementwise import gates as gates_ops
from engine.model.ops.elementwise.norms import GroupNorm
from engine.model.ops.recurrent import gates, mamba2
from tests.state_batches import same_bits

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
TOKENS, HEADS, SIZE = 7, 6, 32
WIDTH = HEADS * SIZE


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("channels", [1, 32])
def test_gates_equal_plain(dtype, channels):
    both = randn(TOKENS, HEADS * (1 + channels) + 3, dtype=dtype)
    b, a = both[:, :HEADS], both[:, HEADS : HEADS * (1 + channels)]
    log_rate, bias = (randn(n, dtype=torch.float32, seed=n) for n in (HEADS, HEADS * channels))
    op = gates.select(dtype, CPU)
    found = op(a, b, log_rate, bias)
    for one, expected in zip(found, gates.gates_plain(a, b, log_rate, bias), strict=True):
        assert_close(one, expected, torch.float32)
    for one, alone in zip(found, op(a[3:4], b[3:4], log_rate, bias), strict=True):
        assert same_bits(one[3:4], alone)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_sigmoid", [False, True])
def test_a_gated_norm_equals_plain(dtype, by_sigmoid):
    x, weight = randn(TOKENS, HEADS, SIZE, dtype=torch.float32), randn(SIZE, dtype=dtype, seed=1)
    gate = randn(TOKENS, HEADS, 2 * SIZE, dtype=dtype, seed=2)[..., SIZE:]
    op = norms.select_gated(dtype, CPU)
    found = op(x, gate, weight, 1e-6, by_sigmoid)
    assert found.dtype == dtype
    assert_close(found, norms.gated_rms_norm_plain(x, gate, weight, 1e-6, by_sigmoid), dtype)
    assert same_bits(op(x[3:4], gate[3:4], weight, 1e-6, by_sigmoid), found[3:4])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_equal_plain(dtype):
    x, y = randn(TOKENS, 2 * WIDTH, dtype=dtype).chunk(2, dim=1)
    beside = randn(TOKENS, HEADS, 2, SIZE, dtype=dtype, seed=1)[:, :, 1]
    assert_close(gates_ops.select_multiply(dtype, CPU)(x, y), x * y, dtype)
    for gate in (beside, beside[..., :1].expand(-1, -1, SIZE)):  # of each value, and one for a head
        expected = x * gate.float().sigmoid().flatten(1).to(dtype)
        assert_close(gates_ops.select_open_gate(dtype, CPU)(x, gate), expected, dtype)
    relu2 = activations.select("relu2", dtype, CPU)(y.contiguous())
    assert_close(relu2, activations.relu2(y.float()).to(dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_steps_of_mamba_equal_plain(dtype):
    row = randn(TOKENS, WIDTH + HEADS, dtype=dtype)
    log_rate, bias = (randn(HEADS, dtype=torch.float32, seed=seed) for seed in (1, 2))
    for limit in ((0.0, float("inf")), (0.1, 2.0)):
        inputs = row[:, :WIDTH], row[:, WIDTH:], log_rate, bias, limit
        for one, expected in zip(mamba2.select(dtype, CPU)[0](*inputs), mamba2.steps_plain(*inputs), strict=True):
            torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("groups", "gate_last"), [(0, False), (2, False), (1, True)])
def test_the_gated_norm_of_mamba_equals_plain(dtype, groups, gate_last):
    y = randn(TOKENS, HEADS, SIZE, dtype=torch.float32)
    x, z = randn(TOKENS, 2 * WIDTH, dtype=dtype, seed=1).chunk(2, dim=1)
    skip, eps = randn(HEADS, dtype=torch.float32, seed=2), 1e-5

    def factors(y: Tensor) -> Tensor:
        return torch.rsqrt(y.unflatten(-1, (groups, -1)).square().mean(-1) + eps)

    weight = randn(WIDTH, dtype=dtype, seed=3)
    of_groups = GroupNorm(weight, eps, groups, gate_last, factors) if groups else None
    found = mamba2.select(dtype, CPU)[1](y.clone(), x, z, skip, of_groups)
    torch.testing.assert_close(found, mamba2.gated_plain(y, x, z, skip, of_groups), atol=1e-4, rtol=TOLERANCE[dtype])

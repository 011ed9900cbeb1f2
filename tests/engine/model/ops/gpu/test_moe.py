"""Experts' MLPs on a GPU against one expert after the other: our kernel, and torch's products, which a cpu has too."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from engine.model.ops import activation, dispatch
from engine.model.ops import moe as ops
from engine.model.ops.gpu import grouped_mm, moe
from engine.model.quantization.format import StoredWeight
from engine.model.quantization.mxfp4 import MXFP4
from engine.model.shard import Shard
from tests.engine.model.ops.gpu.paged import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# tokens, experts, of a token, hidden size, intermediate size
SHAPES = {
    "one token": (1, 8, 2, 32, 24),
    "more experts than pairs": (3, 16, 1, 100, 40),
    "every expert for every token": (20, 2, 2, 32, 24),
    "tiles that are not full": (50, 4, 3, 136, 20),
    "large tiles": (120, 3, 2, 40, 72),
    "sizes no tile divides": (9, 5, 2, 33, 35),
    "as in Qwen 3": (5, 128, 8, 64, 16),
}


def inputs(tokens: int, num_experts: int, k: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, gate_up, down, experts, weights."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    weights, experts = randn(tokens, num_experts).softmax(-1).topk(k)
    gate_up, down = randn(num_experts, 2 * size, hidden) / hidden**0.5, randn(num_experts, hidden, size) / size**0.5
    return randn(tokens, hidden), gate_up, down, experts, weights


def check(
    mix: ops.MixExperts, x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor,
    biases: ops.Biases = None,
) -> None:  # fmt: skip
    found, expected = (
        version(x, gate_up, down, activation.silu_mul, experts, weights, biases)
        for version in (mix, ops.mix_experts_plain)
    )
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_equals_plain(shape):
    check(moe.mix_experts, *inputs(*shape, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["tiles that are not full", "as in Qwen 3"])
def test_the_kernel_equals_plain_in_dtypes_of_two_bytes(shape, dtype):
    check(moe.mix_experts, *inputs(*SHAPES[shape], dtype))


@pytest.mark.parametrize("mix", [moe.mix_experts, grouped_mm.mix_experts])
def test_each_expert_adds_its_own_biases(mix):
    x, gate_up, down, experts, weights = inputs(20, 4, 3, 32, 24, torch.bfloat16)
    biases = gate_up[..., 0].contiguous() * 9, down[..., 0].contiguous() * 9
    check(mix, x, gate_up, down, experts, weights, biases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 2, 32, 32), (50, 4, 3, 96, 64), (120, 3, 2, 64, 160)])
def test_weights_in_mxfp4_multiply_as_what_they_are_dequantized_to(shape, dtype):
    """With every code, scales from 2**-11 to 2**-3, and sizes that no tile divides."""
    x, gate_up, down, experts, weights = inputs(*shape, dtype)
    packed, meant = [], []
    for weight in (gate_up, down):
        whole = Shard(tuple(weight.shape), 1, 0, weight.shape[1])
        with torch.device(DEVICE):
            stored = StoredWeight({"w": whole}, MXFP4())
        for _, target in stored.shards.values():
            target.copy_(torch.randint(256, target.shape, generator=torch.Generator().manual_seed(target.numel())))
        stored.tensors["w"]["scales"].remainder_(9).add_(116)
        packed.append(MXFP4.packed(stored))
        meant.append(MXFP4.dequantize(stored, dtype))
    mix = functools.partial(moe.mix_experts, activation=activation.swigluoai_mul, experts=experts, weights=weights)
    found, expected = mix(x, *packed), mix(x, *meant)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert packed[0].blocks.nbytes + packed[0].scales.nbytes == meant[0].numel() * 17 // 32


@pytest.mark.parametrize("shape", [(1, 8, 2, 32, 24), (50, 4, 3, 32, 24), (3, 16, 1, 40, 48)])
def test_torchs_grouped_products_equal_plain(shape):
    assert grouped_mm.fits(*shape[3:], torch.bfloat16)
    check(grouped_mm.mix_experts, *inputs(*shape, torch.bfloat16))


def test_experts_that_nobody_is_routed_to_and_one_that_gets_all_are_right():
    x, gate_up, down, experts, weights = inputs(40, 6, 1, 32, 24, torch.float32)
    for routed in (torch.full_like(experts, 5), torch.zeros_like(experts), torch.arange(40)[:, None] % 2 * 3):
        check(moe.mix_experts, x, gate_up, down, routed.to(DEVICE), weights)


@pytest.mark.parametrize("rows", [moe.FEW, moe.MANY])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 200])
def test_every_pair_is_in_one_tile_of_its_expert_however_they_are_spread(tokens, rows):
    generator = torch.Generator().manual_seed(tokens)
    for num_experts in (1, 5, 64):
        for crowded in (1, num_experts):
            experts = torch.randint(num_experts - crowded, num_experts, (tokens, 2), generator=generator)
            order, tiles = moe.tile_pairs(experts, num_experts, rows)
            found = []
            for expert, first, end in tiles.T.tolist():
                pairs = order[first:end].tolist()
                assert len(pairs) <= rows and all(experts.flatten()[pair] == expert for pair in pairs)
                found += pairs
            assert sorted(found) == list(range(2 * tokens))


def test_a_model_gets_the_kernel_where_torch_has_none(monkeypatch):
    cpu = torch.device("cpu")
    assert ops.select(32, 24, torch.float32, cpu) is ops.mix_experts_plain
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    assert ops.select(32, 24, torch.float32, cpu) is moe.mix_experts
    assert not grouped_mm.fits(32, 20, torch.bfloat16) and not grouped_mm.fits(36, 24, torch.bfloat16)
    assert not grouped_mm.fits(32, 24, torch.float16)

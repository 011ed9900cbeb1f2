"""Experts' MLPs on a GPU against one expert after the other: our kernel, and torch's products, which a cpu has too."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.model.ops import activation, dispatch
from engine.model.ops import moe as ops
from engine.model.ops.elementwise import activations
from engine.model.ops.gpu import activation as gpu_activation
from engine.model.ops.gpu.experts import grouped_mm, moe, routing
from engine.model.ops.gpu.experts.routing import (
    add_shared,
    sort_pairs,
    top_k_of_groups,
    top_k_sigmoid,
    top_k_softmax,
)
from engine.model.quantization.format import StoredWeight
from engine.model.quantization.mxfp4 import MXFP4
from engine.model.quantization.online import Online
from engine.model.quantization.packed_experts import PackedExperts
from engine.model.quantization.rows import RowFormat
from engine.model.quantization.weight import FP8, QuantizedWeight, quantize_rows
from engine.model.shard import Shard
from tests.engine.model.ops.gpu.grouped_products import scaled_grouped_mm
from tests.engine.model.ops.gpu.paged import DEVICE
from tests.products import each_once, pairwise

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# tokens, experts, of a token, hidden size, intermediate size
SHAPES = {
    "one token": (1, 8, 2, 32, 24),
    "more experts than pairs": (3, 16, 1, 100, 40),
    "every expert for every token": (20, 2, 2, 32, 24),
    "tiles that are not full": (50, 4, 3, 136, 20),
    "large tiles": (120, 3, 2, 40, 72),
    "sizes no tile divides": (9, 5, 2, 33, 35),
    "as in Qwen 3": (2, 128, 8, 64, 16),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(tokens: int, num_experts: int, k: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, gate_up, down, experts, weights."""
    generator = seeded(tokens)

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


@pytest.mark.parametrize(
    ("dtype", "shape"),
    each_once([torch.bfloat16, torch.float16], ["tiles that are not full", "more experts than pairs"]),
)
def test_the_kernel_equals_plain_in_dtypes_of_two_bytes(shape, dtype):
    check(moe.mix_experts, *inputs(*SHAPES[shape], dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("versions", "dtype"), [(moe, torch.float32), (grouped_mm, torch.bfloat16)])
@pytest.mark.parametrize("shape", [(50, 4, 3, 136, 40), (3, 16, 1, 104, 40)])
def test_experts_of_other_ranks_are_left_out(shape, versions, dtype, biased):
    x, gate_up, down, experts, weights = inputs(*shape, dtype)
    own = len(gate_up) // 2
    local, gate_up, down = torch.where(experts < own, experts, own), gate_up[:own], down[:own]
    biases = (gate_up[..., 0].contiguous() * 9, down[..., 0].contiguous() * 9) if biased else None
    check(versions.mix_some_experts, x, gate_up, down, local, weights, biases)
    nowhere = torch.full_like(experts, own)
    assert not versions.mix_some_experts(x, gate_up, down, activation.silu_mul, nowhere, weights, biases).any()


@pytest.mark.parametrize("mix", [moe.mix_experts, grouped_mm.mix_experts])
def test_each_expert_adds_its_own_biases(mix):
    x, gate_up, down, experts, weights = inputs(20, 4, 3, 32, 24, torch.bfloat16)
    biases = gate_up[..., 0].contiguous() * 9, down[..., 0].contiguous() * 9
    check(mix, x, gate_up, down, experts, weights, biases)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    each_once(
        [torch.bfloat16, torch.float16, torch.float32], [(1, 8, 2, 32, 32), (50, 4, 3, 96, 64), (65, 3, 1, 64, 96)]
    ),
)
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
    mix = functools.partial(moe.mix_experts, activation=activations.swigluoai_mul, experts=experts, weights=weights)
    found, expected = mix(x, *packed), mix(x, *meant)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert packed[0].values.nbytes + packed[0].scales.nbytes == meant[0].numel() * 17 // 32


@pytest.mark.parametrize("shape", [(1, 8, 2, 32, 24), (50, 4, 3, 32, 24), (3, 16, 1, 40, 48)])
def test_torchs_grouped_products_equal_plain(shape):
    assert grouped_mm.fits(*shape[3:], torch.bfloat16)
    check(grouped_mm.mix_experts, *inputs(*shape, torch.bfloat16))


def test_experts_that_nobody_is_routed_to_and_one_that_gets_all_are_right():
    x, gate_up, down, experts, weights = inputs(40, 6, 1, 32, 24, torch.float32)
    for routed in (torch.full_like(experts, 5), torch.zeros_like(experts), torch.arange(40)[:, None] % 2 * 3):
        check(moe.mix_experts, x, gate_up, down, routed.to(DEVICE), weights)


@pytest.mark.parametrize("at_once", [routing.COUNTED_AT_ONCE, 0], ids=["one launch", "two launches"])
@pytest.mark.parametrize(
    ("sizes", "rows"), each_once([(1, 5), (7, 1), (16, 5), (17, 20), (700, 3)], [moe.FEW, moe.MANY])
)
def test_every_pair_is_in_one_tile_of_its_expert_however_they_are_spread(sizes, rows, at_once, monkeypatch):
    monkeypatch.setattr(routing, "COUNTED_AT_ONCE", at_once)
    tokens, num_experts = sizes
    for crowded in (1, num_experts):
        experts = torch.randint(num_experts - crowded, num_experts, (tokens, 2), generator=seeded(tokens))
        order, of_tokens, places, ends, tiles = (
            part.cpu() for part in sort_pairs(experts.to(DEVICE), num_experts, rows)
        )
        assert torch.equal(order, experts.flatten().argsort(stable=True))
        assert torch.equal(of_tokens, order // 2)
        assert torch.equal(places, order.argsort())
        assert torch.equal(ends, experts.flatten().bincount(minlength=num_experts).cumsum(0).int())
        found = []
        for expert, first, end in tiles.T.tolist():
            pairs = order[first:end].tolist()
            assert len(pairs) <= rows and all(experts.flatten()[pair] == expert for pair in pairs)
            found += pairs
        assert sorted(found) == list(range(2 * tokens))


@pytest.mark.parametrize(
    ("chosen", "normalise", "dtype"),
    pairwise([(5, 2), (60, 4), (128, 8), (1, 1)], [True, False], [torch.float32, torch.bfloat16]),
)
def test_the_router_chooses_and_weighs_experts_as_plain_torch(chosen, normalise, dtype):
    num_experts, k = chosen
    # a wider tensor's columns, and no ties, of which torch picks any
    logits = torch.stack([torch.randperm(num_experts + 3, generator=seeded(i)) for i in range(6)]).to(DEVICE, dtype)
    logits = logits[:, :num_experts] / 8
    experts, weights = top_k_softmax(logits, k, normalise)
    expected, expected_weights = ops.top_k_softmax_plain(logits, k, normalise)
    assert torch.equal(experts, expected) and weights.dtype == dtype
    torch.testing.assert_close(weights, expected_weights, atol=TOLERANCE[dtype] / 10, rtol=TOLERANCE[dtype] / 4)


@pytest.mark.parametrize(
    ("chosen", "normalise"),
    each_once(
        [
            (16, (4, 2), 5),
            (32, (8, 4), 8),
            (20, (1, 1), 3),
            (8, (2, 1), 1),
            (30, (3, 2), 7),
            (160, (8, 3), 6),
            (12, (6, 6), 4),
        ],
        [True, False],
    ),
)
def test_the_router_of_deepseek_v3_chooses_and_weighs_experts_as_plain_torch(chosen, normalise):
    num_experts, groups, k = chosen
    logits = torch.randn(6, num_experts + 3, generator=seeded(k))[:, :num_experts].to(DEVICE)
    correction = torch.randn(num_experts, generator=seeded(1)).to(DEVICE)
    options = groups, k, normalise, 2.5, torch.float32
    experts, weights = top_k_sigmoid(logits, correction, *options)
    expected, expected_weights = ops.top_k_sigmoid_plain(logits, correction, *options)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chosen", [(20, (1, 1), 3), (160, (8, 3), 6), (30, (3, 2), 7)])
def test_the_router_of_deepseek_v2_chooses_and_weighs_experts_as_plain_torch(chosen):
    num_experts, *options = chosen
    logits = torch.randn(5, num_experts + 3, generator=seeded(0))[:, :num_experts].to(DEVICE)
    experts, weights = top_k_of_groups(logits, *options, 16.0, torch.bfloat16)
    expected, expected_weights = ops.top_k_of_groups_plain(logits, *options, 16.0, torch.bfloat16)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_as_by_plain_torch(gated, dtype):
    x, y = torch.randn(2, 3, 1100, generator=seeded(0)).to(DEVICE, dtype)
    gate = torch.randn(3, 8, generator=seeded(1)).to(DEVICE, dtype)[:, :1] if gated else None
    torch.testing.assert_close(
        add_shared(x, y, gate), ops.add_shared_plain(x, y, gate), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("groups", [None, (1, 1), (4, 2), (3, 2)])
def test_a_row_of_nan_is_routed_to_experts_that_there_are(groups):
    logits = torch.full((2, 5 if groups is None else 5 * groups[0]), torch.nan, device=DEVICE)
    if groups is None:
        experts, weights = top_k_softmax(logits, 3, True)
    else:
        experts, weights = top_k_sigmoid(logits, logits[0], groups, 3, True, 1.0, torch.float32)
    assert experts.min() >= 0 and experts.max() < logits.shape[1] and weights.isnan().all()


def fp8(weight: Tensor, group_size: int | None = None) -> QuantizedWeight:
    return QuantizedWeight(*quantize_rows(weight, FP8, group_size), None, 8, FP8)


def int4_without_zero_points(weight: Tensor) -> QuantizedWeight:
    values, scale = quantize_rows(weight, torch.int8, 32)
    return QuantizedWeight((values.float() / 16).round().clamp(-8, 7).to(torch.int8), scale * 16, None, 4, None)


# how an expert's weight is rounded, and hidden and intermediate sizes
QUANTIZED = {
    "float8, a scale per output": (fp8, 100, 40),
    "float8, a scale per 64 inputs": (lambda weight: fp8(weight, 64), 128, 64),
    "int8, a scale per output": (Online("int8").quantize, 68, 36),
    "int4 with zero points": (Online("int4").quantize, 64, 128),
    "int4, groups of 32": (int4_without_zero_points, 64, 96),
}


ROUTED = [
    ((1, 3, 2), torch.float32),
    ((33, 2, 1), torch.bfloat16),
    ((50, 4, 3), torch.float16),
    ((120, 3, 2), torch.float32),
]


@pytest.mark.parametrize(("kind", "routed"), each_once(QUANTIZED, ROUTED))
def test_quantized_experts_multiply_as_what_they_are_dequantized_to(kind, routed, monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(moe, "multiplies_float8", lambda device: False)
    (quantize, *sizes), (counts, dtype) = QUANTIZED[kind], routed
    x, gate_up, down, experts, weights = inputs(*counts, *sizes, dtype)
    rounded = [[quantize(expert) for expert in weight] for weight in (gate_up, down)]
    packed = [ops.pack_experts(some, len(some), dtype) for some in rounded]
    meant = [torch.stack([expert.dequantize(dtype) for expert in some]) for some in rounded]
    assert all(isinstance(some, PackedExperts) for some in packed)
    assert [some.shape for some in packed] == [some.shape for some in meant]
    mix = functools.partial(moe.mix_experts, activation=activation.silu_mul, experts=experts, weights=weights)
    torch.testing.assert_close(mix(x, *packed), mix(x, *meant), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("sizes", "group", "routed", "versions", "act"),
    [
        pytest.param(*case, act, marks=() if (case[2][0], act) in FEW else pytest.mark.slow)
        for FEW in [{(33, "silu"), (3, "swigluoai"), (20, "silu")}]
        for case in (
            ((256, 256), 128, (33, 2, 1), moe),
            ((128, 192), 64, (50, 4, 3), moe),
            ((100, 48), None, (3, 5, 2), moe),
            ((100, 48), None, (120, 3, 2), moe),
            ((96, 48), None, (20, 5, 2), grouped_mm),
        )
        for act in ("silu", "swigluoai")
    ],
)
@pytest.mark.parametrize("some", [False, True], ids=["all experts", "half of them"])
def test_rows_and_experts_in_float8_are_multiplied_as_what_they_are_rounded_to(
    sizes, group, routed, versions, act, some, monkeypatch
):
    """With a scale per group of inputs or per output. The row between the products is rounded like the first one."""
    if versions is grouped_mm and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch multiplies groups of float8 rows on Hopper alone")
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(moe, "multiplies_float8", lambda device: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    x, gate_up, down, experts, weights = inputs(*routed, *sizes, torch.bfloat16)
    rounded = [[fp8(expert, group) for expert in weight] for weight in (gate_up, down)]
    packed = [ops.pack_experts(some, len(some), torch.bfloat16) for some in rounded]
    assert [moe.row_format(some, x.dtype) for some in packed] == [RowFormat(FP8, group)] * 2

    def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
        values, scale = quantize_rows(x, FP8, group)
        wide = values.float().unflatten(1, (-1, group or x.shape[1])) * scale[..., None]
        return (wide.flatten(1) @ weight.dequantize(torch.float32).T).to(torch.bfloat16)

    own = routed[1] // 2 if some else routed[1]
    expected = torch.zeros(x.shape, device=x.device)
    for token, chosen in enumerate(experts.tolist()):
        for expert, share in zip(chosen, weights[token].float(), strict=True):
            if expert < own:
                hidden = activations.PLAIN[act](product(x[token : token + 1], rounded[0][expert]))
                expected[token] += share * product(hidden, rounded[1][expert])[0].float()
    if some:
        packed = [replace(part, values=part.values[:own], scales=part.scales[:own]) for part in packed]
        experts = torch.where(experts < own, experts, own)
    mix = versions.mix_some_experts if some else versions.mix_experts
    found = mix(x, *packed, gpu_activation.GATED[act], experts, weights)
    # a number that lies between two of float8 may be rounded to either, by the order of sums
    assert (found.float() - expected).norm() < 2e-2 * expected.norm()


def test_rows_are_rounded_only_for_experts_that_want_it_and_where_tensor_cores_multiply_float8(monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    weight = torch.randn(4, 64, generator=seeded(0))
    wanted, groups = (ops.pack_experts([fp8(weight, size)], 1, torch.bfloat16) for size in (None, 32))
    bf16 = torch.bfloat16
    assert moe.row_format(wanted, bf16) is None
    monkeypatch.setattr(moe, "multiplies_float8", lambda device: True)
    assert moe.row_format(wanted, bf16) == RowFormat(FP8) and moe.row_format(weight, bf16) is None
    assert moe.row_format(wanted, torch.float32) is None
    plain = replace(fp8(weight), activations=None)
    assert moe.row_format(ops.pack_experts([plain], 1, bf16), bf16) is None
    assert moe.row_format(groups, bf16) is None, "groups of 32 inputs"


def test_every_float8_number_is_read_as_it_is_without_a_type_for_it(monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[(codes & 127) != 127].view(FP8)  # all but NaN
    size = len(codes)
    weight = QuantizedWeight(codes[None], torch.ones(1, 1, device=DEVICE), None, 8, FP8)
    packed = ops.pack_experts([weight], 1, torch.float32)
    sorted_pairs = sort_pairs(torch.zeros(size, 1, dtype=torch.int64, device=DEVICE), 1, moe.MANY)
    found = moe.grouped_linear(
        torch.eye(size, device=DEVICE), packed, None, sorted_pairs.order, sorted_pairs.tiles, moe.MANY
    )
    assert torch.equal(found[:, 0], codes.float())


@pytest.mark.parametrize("weight", [
    QuantizedWeight(torch.ones(4, 96, dtype=torch.int8), torch.ones(4, 2), None, 8, None),
    QuantizedWeight(torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 1), torch.ones(4, 1), 8, None),
    QuantizedWeight(torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 4), None, 4, None),
], ids=["8 bits in groups of 48", "8 bits with zero points", "4 bits in groups of 16"])  # fmt: skip
def test_experts_that_the_kernel_cannot_read_are_dequantized(weight, monkeypatch):
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    found = ops.pack_experts([weight, weight], 2, torch.bfloat16)
    assert torch.equal(found, torch.stack([weight.dequantize(torch.bfloat16)] * 2))


def test_a_model_gets_the_kernel_where_torch_has_none(monkeypatch):
    cpu = torch.device("cpu")
    assert ops.select(32, 24, torch.float32, cpu) is ops.mix_experts_plain
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    assert ops.select(32, 24, torch.float32, cpu) is moe.mix_experts
    assert ops.select(32, 24, torch.float32, cpu, some=True) is moe.mix_some_experts
    assert not grouped_mm.fits(32, 20, torch.bfloat16) and not grouped_mm.fits(36, 24, torch.bfloat16)
    assert not grouped_mm.fits(32, 24, torch.float16)


@pytest.mark.parametrize(
    ("capability", "ours"),
    [((8, 9), True), ((9, 0), False), ((10, 0), False), ((10, 3), False), ((11, 0), True), ((12, 0), True)],
)
def test_torch_multiplies_experts_only_on_cards_for_which_it_has_a_kernel(monkeypatch, capability, ours):
    """Elsewhere it reads the ends of the groups on the host, in every layer of every step."""
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    versions = moe if ours else grouped_mm
    for some, expected in ((False, versions.mix_experts), (True, versions.mix_some_experts)):
        assert ops.select(32, 24, torch.bfloat16, torch.device("cuda"), some) is expected


@pytest.mark.parametrize(
    ("capability", "quantize", "sizes", "ours"),
    [
        ((9, 0), fp8, (32, 64), False),
        ((9, 0), fp8, (36, 64), True),  # rows that do not start at 16 bytes
        ((9, 0), lambda weight: fp8(weight, 64), (64, 128), True),
        ((9, 0), Online("int8").quantize, (32, 64), True),
        ((8, 9), fp8, (32, 64), True),
        ((10, 0), fp8, (32, 64), True),
    ],
)
def test_torch_multiplies_experts_in_float8_on_hopper_if_each_row_has_one_scale(
    capability, quantize, sizes, ours, monkeypatch
):
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(moe, "multiplies_float8", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    packed = [ops.pack_experts([quantize(torch.randn(sizes))], 1, torch.bfloat16) for _ in range(2)]
    versions = moe if ours else grouped_mm
    for some, expected in ((False, versions.mix_experts), (True, versions.mix_some_experts)):
        assert ops.select_packed(packed, torch.bfloat16, torch.device("cuda"), some) is expected

"""The Triton kernels of norms, activations, rotary embedding and KV writes against their plain twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.ops import attention, norm
from engine.model.ops.elementwise import activations, gates
from engine.model.ops.gpu import activation as gpu_activation
from engine.model.ops.gpu import norm as gpu_norm
from engine.model.ops.gpu import rope as gpu_rope
from engine.model.ops.norm import HeadNorms
from tests.engine.model.ops.gpu.paged import DEVICE, FLOAT8, Case

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 3072)])
def test_rms_norm_equals_plain(dtype, shift, shape):
    x, weight = randn(*shape, dtype=dtype) * 10, randn(shape[1], dtype=dtype)
    assert_close(gpu_norm.rms_norm(x, weight, 1e-6, shift), norm.rms_norm_plain(x, weight, 1e-6, shift))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_sum_and_its_norm_equal_plain(dtype, shift):
    merged, weight = randn(5, 2, 100, dtype=dtype), randn(100, dtype=dtype)
    x, y = merged.unbind(1)
    total, normed = gpu_norm.add_rms_norm(x, y, weight, 1e-6, shift)
    assert torch.equal(total, x + y)
    assert_close(normed, norm.rms_norm_plain(x + y, weight, 1e-6, shift))


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 8), (5, 3, 80), (40, 7, 128)])
def test_rms_norm_of_heads_reads_a_part_of_the_merged_projection(tokens, heads, size):
    merged, weight = randn(tokens, heads + 3, size, dtype=torch.bfloat16), randn(size, dtype=torch.bfloat16)
    x = merged[:, 1 : 1 + heads]
    found = gpu_norm.rms_norm(x, weight, 1e-6, 0.0)
    assert found.is_contiguous()
    assert_close(found, norm.rms_norm_plain(x, weight, 1e-6, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activations.PLAIN)
@pytest.mark.parametrize(("tokens", "size", "scale"), [(0, 4, 1.0), (1, 5, 1.0), (3, 1025, 30.0), (2, 64, 300.0)])
def test_gated_activations_equal_plain(dtype, name, tokens, size, scale):
    x = randn(tokens, 2 * size, dtype=dtype) * scale
    assert_close(gpu_activation.GATED[name](x), activations.PLAIN[name](x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_beside_its_query_opens_the_output_of_attention_as_in_plain_torch(dtype):
    x, gate = randn(3, 4 * 300, dtype=dtype), randn(3, 4, 2, 300, dtype=dtype)[:, :, 1]
    assert_close(gpu_activation.open_gate(x, gate), gates.open_gate(x, gate))
    of_head = gate[..., :1].expand(-1, -1, 300)
    assert_close(gpu_activation.open_gate(x, of_head), gates.open_gate(x, of_head))


WRITES = {
    "plain": Case([(5, 1), (0, 9), (16, 1)]),
    "padding": Case([(5, 1), (0, 0), (16, 1)]),
    "three heads of 80, blocks of 5": Case([(5, 1), (0, 9)], heads=6, kv_heads=3, head_dim=80, block_size=5),
    "five heads for one": Case([(5, 1), (0, 9)], heads=5, kv_heads=1, head_dim=128),
    "head_dim 2": Case([(5, 1), (0, 9)], head_dim=2),
    "half of each head rotated": Case([(5, 1), (0, 9)], rotary_dim=32),
    "most of each head rotated, float8": Case([(0, 9)], head_dim=128, rotary_dim=96, cache_dtype=FLOAT8),
    "float16": Case([(0, 3)], dtype=torch.float16),
    "float32": Case([(0, 3)], dtype=torch.float32),
    "float8": Case([(0, 30), (5, 1)], cache_dtype=FLOAT8),
}


def cos_sin(case: Case) -> Tensor:
    """Return a table of exact turns by 0, 90, 180 and 270 degrees, so that every version gives the same bits."""
    angles = torch.arange(64)[:, None] * torch.arange(1, (case.rotary_dim or case.head_dim) // 2 + 1)[None] % 4
    cos, sin = torch.tensor([1, 0, -1, 0])[angles], torch.tensor([0, 1, 0, -1])[angles]
    return torch.cat((cos, sin), dim=1).to(DEVICE, case.dtype)


@pytest.mark.parametrize("case", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("layer", [0, 1])
def test_rotate_and_write_writes_the_bytes_that_plain_writes(case, layer):
    q, k, v, batch = case.inputs()
    k[0, 0, 0], v[0, 0, 0], k[-1, 0, 1] = 1000.0, -1000.0, 1e-4  # past what float8 holds here, and next to nothing
    table, before = cos_sin(case), batch.kv_cache.clone()
    expected = attention.rotate_and_write(q, k, v, table, batch, layer)
    written, batch.kv_cache = batch.kv_cache, before
    assert torch.equal(gpu_rope.rotate_and_write(q, k, v, table, batch, layer), expected)
    assert torch.equal(batch.kv_cache.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(
    "case",
    [WRITES["plain"], WRITES["three heads of 80, blocks of 5"], WRITES["half of each head rotated"], WRITES["float32"]],
    ids=["plain", "three heads of 80", "half of each head rotated", "float32"],
)
def test_heads_are_normalised_before_they_are_rotated_and_written(case, shift):
    q, k, v, batch = case.inputs()
    norms = HeadNorms(*(randn(case.head_dim + i, dtype=case.dtype)[i:] for i in range(2)), 1e-6, shift)
    table, before = randn(64, case.rotary_dim or case.head_dim, dtype=case.dtype), batch.kv_cache.clone()
    expected = attention.rotate_and_write(q, k, v, table, batch, 1, norms)
    written, batch.kv_cache = batch.kv_cache, before
    found = gpu_rope.rotate_and_write(q, k, v, table, batch, 1, norms)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=6e-2, rtol=2e-2)
    torch.testing.assert_close(batch.kv_cache, written, atol=6e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_turning_by_any_angle_equals_plain_and_leaves_the_neighbours_alone(dtype):
    case = Case([(40, 1), (0, 6)], heads=3, kv_heads=1, head_dim=80, dtype=dtype)
    q, k, v, batch = case.inputs()
    table = randn(64, case.head_dim, dtype=dtype)
    expected = attention.rotate_and_write(q, k, v, table, batch, 0)
    kept, by_plain = (k.clone(), v.clone()), batch.kv_cache.clone()
    assert_close(gpu_rope.rotate_and_write(q, k, v, table, batch, 0), expected)
    torch.testing.assert_close(batch.kv_cache, by_plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])

"""Latent attention in Triton against the plain one."""

from __future__ import annotations

import pytest
import torch

from engine.model.layers.latent_attention import of_heads, rotate
from engine.model.ops.gpu import latent_attention, latent_rope
from engine.model.ops.latent import attention as latent_plain
from engine.model.ops.norm import rms_norm_plain
from tests.engine.model.ops.gpu.paged import DEVICE, latent_inputs
from tests.models import with_slow

CASES = {
    "rows and chunks": ([(37, 1), (0, 9), (5, 1), (50, 6)], 4, 24, 8),
    "heads in two parts, keys in several splits, padding": ([(700, 1), (0, 0), (30, 1)], 32, 16, 16),
    "three heads, keys of a chunk in several splits": ([(600, 5)], 3, 16, 8),
    "bfloat16": ([(37, 1), (4, 5)], 16, 64, 16),
}


@pytest.mark.parametrize("case", with_slow(CASES, ("three heads, keys of a chunk in several splits",)))
def test_latent_attention_equals_plain(case):
    sequences, heads, rank, rope = CASES[case]
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    q, latent, batch = latent_inputs(sequences, heads, rank, rope, dtype)
    written = batch.kv_cache.clone()
    latent_rope.write_latent(latent, batch, 1)
    found, batch.kv_cache = batch.kv_cache, written
    latent_plain.write_latent(latent, batch, 1)
    assert torch.equal(found.view(torch.uint8), written.view(torch.uint8))
    expected = latent_plain.latent_attention(q, batch, 1, 0.2, rank)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    attended = latent_attention.latent_attention(q, batch, 1, 0.2, rank)
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_one_kernel_norms_latents_rotates_queries_and_keys_and_writes_the_cache(interleaved, dtype):
    """q, c and k are parts of what projections return; the last row is padding."""
    heads, rank, rope = 3, 24, 8
    _, _, batch = latent_inputs([(5, 1), (0, 6), (0, 0)], heads, rank, rope, dtype)
    generator, tokens = torch.Generator().manual_seed(0), len(batch.positions)
    made = (
        torch.randn(tokens, heads, 16 + rope, generator=generator),
        torch.randn(tokens, rank + rope, generator=generator),
    )
    q, latent = made[0].to(DEVICE, dtype)[..., 16:], made[1].to(DEVICE, dtype)
    (c, k), weight = latent.split((rank, rope), dim=1), torch.linspace(0.5, 2, rank).to(DEVICE, dtype)
    table = torch.randn(16, rope, generator=generator).to(DEVICE, dtype)
    written, out = batch.kv_cache.clone(), torch.zeros(tokens, heads, rank + rope, dtype=dtype, device=DEVICE)
    latent_rope.rotate_and_write_latent(out, q, c, k, (weight, 1e-6), table, interleaved, batch, 1)
    found, batch.kv_cache = batch.kv_cache, written
    rotated = rotate(k[:, None], table, batch, interleaved)[:, 0]
    latent_plain.write_latent(torch.cat((rms_norm_plain(c, weight, 1e-6, 0.0), rotated), dim=1), batch, 1)
    tolerance = {"atol": 3e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(found, batch.kv_cache, equal_nan=True, **tolerance)
    torch.testing.assert_close(out[..., rank:], rotate(q, table, batch, interleaved), **tolerance)
    assert not out[..., :rank].any()


def test_heads_are_multiplied_at_once_as_one_by_one():
    x, weights = torch.randn(5, 3, 16).to(DEVICE), torch.randn(3, 8, 16).to(DEVICE)
    torch.testing.assert_close(of_heads(x, weights), of_heads(x, list(weights)), atol=1e-4, rtol=1e-4)

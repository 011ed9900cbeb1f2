"""Scores of an indexer, selection, and attention to what is selected."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.ops.sparse import sparse_attention
from tests.cpu_kernels import needs_linear_kernel

TOPK, RANK, WIDTH, DIM = 12, 24, 32, 20
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def rows(dtype: torch.dtype) -> dict[str, Any]:
    """Rows that see 0 to 40 tokens of one layer in a cache of 100 vectors."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([0, 1, 7, 12, 13, 40], dtype=torch.int32)
    cached = torch.randn(100, WIDTH + DIM, generator=generator).to(dtype)
    return {
        "index_q": torch.randn(6, 3, DIM, generator=generator).to(dtype),
        "weights": torch.randn(6, 3, generator=generator),
        "q": torch.randn(6, 2, WIDTH, generator=generator).to(dtype),
        "keys": cached[:, WIDTH:],
        "vectors": cached[:, :WIDTH],
        "places": torch.stack([torch.randperm(100, generator=generator)[:40] for _ in lengths]).int(),
        "lengths": lengths,
    }


def attended(ops: ModuleType, x: dict[str, Any], chosen: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return the scores of some rows' tokens, and what the rows attend to."""
    index_q, weights, q, places, lengths = (
        x[name][chosen].contiguous() for name in ("index_q", "weights", "q", "places", "lengths")
    )
    scores = ops.index_scores(index_q, weights, x["keys"], places, lengths)
    selected, counts = sparse_attention.select_tokens(scores, places, lengths, TOPK)
    seen = torch.arange(scores.shape[1]) < lengths[:, None]
    return scores.where(seen, 0.0), ops.attend_selected(q, x["vectors"], selected, counts, 0.2, RANK)


def test_what_a_row_does_not_select_may_be_anything():
    x = rows(torch.float32)
    expected = attended(sparse_attention, x)[1]
    unseen = torch.ones(100, dtype=torch.bool)
    for places, length in zip(x["places"], x["lengths"], strict=True):
        unseen[places[:length].long()] = False
    assert unseen.any()
    x["vectors"][unseen] = torch.nan
    x["places"] = torch.where(torch.arange(40) < x["lengths"][:, None], x["places"], unseen.nonzero()[0].int())
    selected = torch.full((6, TOPK), unseen.nonzero()[0].item(), dtype=torch.int32)
    counts = x["lengths"].clamp(max=1)
    selected[:, 0] = x["places"][:, 0]
    assert sparse_attention.attend_selected(x["q"], x["vectors"], selected, counts, 0.2, RANK).isfinite().all()
    torch.testing.assert_close(attended(sparse_attention, x)[1], expected)


@needs_linear_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_plain_torch_and_a_row_has_the_same_bits_alone(dtype):
    from engine.model.ops.cpu.sparse import sparse_attention as kernels

    x = rows(dtype)
    found = attended(kernels, x)
    for ours, plain in zip(found, attended(sparse_attention, x), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=TOLERANCE[dtype])
    assert found[1].isfinite().all() and not found[1][0].any()
    for row in range(6):
        for all_rows, alone in zip(found, attended(kernels, x, slice(row, row + 1)), strict=True):
            assert torch.equal(all_rows[row], alone[0])


def test_the_best_tokens_are_selected_in_their_order_and_the_earlier_of_equals():
    scores = torch.tensor(
        [[0.0, 3.0, 0.0, 0.0, 5.0, 0.0], [9.0, -1.0, 8.0, 7.0, 6.0, 9.0], [1.0, 2.0, 9.0, 9.0, 9.0, 9.0]]
    )
    places, lengths = torch.arange(6, dtype=torch.int32).repeat(3, 1) + 10, torch.tensor([6, 5, 2])
    selected, counts = sparse_attention.select_tokens(scores, places, lengths, 4)
    assert counts.tolist() == [4, 4, 2]
    assert [row[:count].tolist() for row, count in zip(selected, counts, strict=True)] == [
        [10, 11, 12, 14], [10, 12, 13, 14], [10, 11],
    ]  # fmt: skip

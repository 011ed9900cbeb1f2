"""The best token of each row, found in two launches, and rows that are drawn, against plain torch on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.jit import KernelInterface

from engine.model.ops.gpu import sampling
from engine.model.ops.sampling import RandomRows, draw_rows_in_parts, draw_rows_plain, sample_rows_plain
from engine.wire.plan import ALL_TOKENS_BANNED
from tests.engine.model.ops.gpu.paged import DEVICE

VOCAB = sampling.SEGMENT + 7


def group(width: int, rows: list[int], *parameters: tuple[float, float, float], temperature: float = 1.0) -> RandomRows:
    """parameters: (uniform, top_p, min_p) of each row."""
    columns = torch.tensor(parameters).split(1, dim=1)
    return RandomRows(torch.tensor(rows), torch.full((len(rows), 1), temperature), *columns, width)


def moved(rows: RandomRows, device: str = DEVICE) -> RandomRows:
    columns = rows.rows, rows.temperature, rows.uniform, rows.top_p, rows.min_p
    return RandomRows(*(x.contiguous().to(device) for x in columns), rows.width)


def found(logits: Tensor, *groups: RandomRows) -> list[int]:
    return sampling.sample_rows(logits.to(DEVICE), [moved(rows) for rows in groups]).tolist()


def expected(logits: Tensor, *groups: RandomRows) -> list[int]:
    return sample_rows_plain(draw_rows_in_parts, logits, list(groups)).tolist()


@pytest.mark.parametrize("vocab", [1, 50, VOCAB, 2 * sampling.SEGMENT])
def test_without_random_rows_each_takes_its_most_likely_token_and_of_equal_ones_the_first(vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1, vocab // 2 :] = 9.0
    assert found(logits) == expected(logits)
    assert found(logits.bfloat16()) == expected(logits.bfloat16())


def test_broken_rows_have_no_token_and_leave_the_others_alone():
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, 3], logits[2, 5], logits[3, VOCAB - 1] = -torch.inf, torch.nan, torch.inf, torch.nan
    groups = group(VOCAB, [0, 1, 6], *[(0.8, 0.9, 0.0)] * 3), group(0, [2, 3, 7], *[(0.8, 1.0, 0.0)] * 3)
    tokens = found(logits, *groups)
    assert tokens == expected(logits, *groups)
    assert tokens[:4] == [ALL_TOKENS_BANNED, -1, -1, -1] and min(tokens[4:]) >= 0


def test_rows_of_every_kind_take_two_launches_of_our_own():
    """Groups name their rows in any order."""
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    groups = (
        group(0, [5, 0], (0.7, 1.0, 0.0), (0.3, 1.0, 0.0), temperature=2.0),
        group(40, [3, 2], (0.7, 0.8, 0.0), (0.3, 1.0, 0.01), temperature=0.5),
        group(VOCAB, [4], (0.6, 0.8, 0.01), temperature=1.5),
    )
    launched: list[str] = []
    launch = KernelInterface.__getitem__
    with mock.patch.object(KernelInterface, "__getitem__", lambda kernel, grid: (
        launched.append(kernel.fn.__name__), launch(kernel, grid)
    )[1]):  # fmt: skip
        assert found(logits, *groups) == expected(logits, *groups)
    assert launched == ["best_of_segment_kernel", "best_of_row_kernel"]


@settings(max_examples=30, derandomize=True)
@given(
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, -300.0, 1000.0]),
    top_k=st.sampled_from([None, 2, 50, 1024, 1500]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
    uniform=st.integers(0, 2**24 - 1).map(lambda n: n / 2**24),
    seed=st.integers(0, 1000),
)
def test_the_same_number_draws_the_same_token_as_on_a_cpu(spread, offset, top_k, top_p, min_p, uniform, seed):
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(seed)) * spread + offset
    width = top_k or (3000 if top_p < 1.0 or min_p > 0.0 else 0)
    rows = group(width, [1, 0], (uniform, top_p, min_p), (1 - 2**-24 - uniform / 2, top_p, min_p))
    best = logits.amax(-1).to(DEVICE)
    drawn = draw_rows_plain(logits.to(DEVICE), best, moved(rows))
    assert torch.equal(drawn.cpu(), draw_rows_in_parts(logits, best, rows))


@pytest.mark.parametrize("width", [0, 40, VOCAB], ids=["no filters", "top_k", "top_p and min_p"])
def test_no_value_is_read_on_the_host(width):
    """Tensors without values would raise."""
    logits, rows = torch.empty(3, VOCAB, device="meta"), group(width, [2, 0], *[(0.5, 0.9, 0.1)] * 2)
    assert draw_rows_plain(logits, logits[:, 0], moved(rows, "meta")).shape == (2,)

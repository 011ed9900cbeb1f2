"""The draw without sorting against the plain one, which sorts. Few rows: the interpreter takes 0.1 s for each."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.jit import KernelInterface

from engine.model.ops.gpu import sampling
from engine.model.ops.sampling_plain import RandomRows, draw, draw_rows_plain, draw_sorted, sample_rows_plain
from engine.wire.plan import ALL_TOKENS_BANNED
from tests.engine.model.ops.gpu.paged import DEVICE

pytestmark = pytest.mark.kernels


def group(top_k: int, *rows: tuple[float, float, float]) -> RandomRows:
    """rows: (uniform, top_p, min_p)."""
    columns = torch.tensor(rows).split(1, dim=1)
    top_ks = torch.full((len(rows), 1), top_k, dtype=torch.int32)
    return RandomRows(torch.arange(len(rows)), torch.ones(len(rows), 1), *columns, top_ks, top_k)


def moved(rows: RandomRows) -> RandomRows:
    columns = rows.rows, rows.temperature, rows.uniform, rows.top_p, rows.min_p, rows.top_k
    return RandomRows(*(x.contiguous().to(DEVICE) for x in columns), rows.width)


def drawn(logits: Tensor, rows: RandomRows) -> Tensor:
    return sampling.sample_rows(logits.to(DEVICE), [moved(rows)]).cpu()


@pytest.mark.parametrize(
    "rows",
    [
        group(5000, (0.5, 0.9, 0.0), (0.97, 0.6, 0.0), (0.99, 0.0, 0.0), (0.3, 1.0, 0.05)),
        group(20, (0.7, 1.0, 0.0), (0.9, 0.7, 0.0), (0.999, 0.9, 0.2)),
        group(1, (0.99, 1.0, 0.0)),
    ],
    ids=["top_p and min_p", "top_k", "one token"],
)
def test_the_same_number_draws_the_same_token_as_sorting(rows):
    logits = torch.randn(len(rows.rows), 5000, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(drawn(logits, rows), draw_sorted(logits, rows))


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, -300.0, 1000.0]),
    top_k=st.sampled_from([1, 3, 50]),
    top_p=st.sampled_from([0.1, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
    uniform=st.integers(0, 2**24 - 1).map(lambda n: n / 2**24),
    seed=st.integers(0, 1000),
)
def test_any_logits_give_the_same_token_as_sorting(spread, offset, top_k, top_p, min_p, uniform, seed):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * spread + offset
    rows = group(top_k, (uniform, top_p, min_p))
    assert torch.equal(drawn(logits, rows), draw_sorted(logits, rows))


@pytest.mark.parametrize("spread", [1.0, 9.0], ids=["all are likely", "few are"])
def test_rows_of_a_batch_may_each_have_their_own_top_k_in_one_launch(spread):
    vocab = sampling.SEGMENT + 100
    groups = [group(40, (0.7, 0.9, 0.0)), group(vocab, (0.7, 0.9, 0.0)), group(vocab, (0.6, 1.0, 0.2))]
    logits = torch.randn(len(groups), vocab, generator=torch.Generator().manual_seed(1)) * spread
    columns = zip(
        *([rows.temperature, rows.uniform, rows.top_p, rows.min_p, rows.top_k] for rows in groups), strict=True
    )
    together = RandomRows(torch.arange(len(groups)), *map(torch.cat, columns), vocab)
    assert drawn(logits, together).tolist() == [
        draw_sorted(logits[i : i + 1], rows).item() for i, rows in enumerate(groups)
    ]


def test_of_equally_likely_tokens_the_first_ones_are_kept_and_drawn_alike():
    numbers = (0.1, 0.4, 0.6, 0.9)
    rows = group(10, *((u, top_p, 0.0) for top_p in (1.0, 0.5, 0.51) for u in numbers))
    logits = torch.full((len(rows.rows), 10), -torch.inf)
    logits[:, [2, 5, 7, 9]] = 1.5
    assert drawn(logits, rows).tolist() == [2, 5, 7, 9, 2, 2, 5, 5, 2, 5, 5, 7]


def test_broken_rows_have_no_token_and_leave_the_others_alone():
    rows = group(50, *[(0.8, 0.9, 0.0)] * 4)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = draw_sorted(logits, rows)
    logits[0], logits[1, 3], logits[2, 5] = -torch.inf, torch.nan, torch.inf
    assert drawn(logits, rows).tolist() == [ALL_TOKENS_BANNED, -1, -1, expected[3]]


def drawn_of_all(logits: Tensor, uniform: Tensor) -> Tensor:
    rows = group(logits.shape[1], *[(u, 1.0, 0.0) for u in uniform.tolist()])
    rows.width = 0
    return drawn(logits, rows)


def test_rows_of_every_kind_are_sampled_in_two_launches_that_read_the_models_logits():
    """Greedy ones have a top_k of 1. The group names its rows in any order and divides by their temperatures. Of equal
    logits the first counts."""
    vocab, generator = sampling.SEGMENT + 7, torch.Generator().manual_seed(2)
    logits = torch.randn(6, vocab, generator=generator) * 3
    logits[1, [9, 40, sampling.SEGMENT + 1]] = 30.0
    logits[2, 3] = torch.nan
    order, top_ks = [5, 0, 3, 2, 4, 1], [vocab, vocab, 40, 40, vocab, 1]
    together = group(vocab, *[(0.7, 1.0, 0.0), (0.3, 1.0, 0.0)] * 2, (0.6, 0.8, 0.01), (0.5, 1.0, 0.0))
    together.rows, together.top_k = torch.tensor(order), torch.tensor(top_ks, dtype=torch.int32)[:, None]
    together.temperature = torch.tensor([0.5, 2.0, 0.5, 2.0, 1.5, 0.0])[:, None]
    parts = [together.part([i]) for i in range(len(order))]
    for part, width in zip(parts, (0, 0, 40, 40, vocab, 1), strict=True):
        part.width = width
    launched: list[str] = []
    launch = KernelInterface.__getitem__
    with mock.patch.object(KernelInterface, "__getitem__", lambda kernel, grid: (
        launched.append(kernel.fn.__name__), launch(kernel, grid)
    )[1]):  # fmt: skip
        found = sampling.sample_rows(logits.to(DEVICE), [moved(together)]).tolist()
    expected = sample_rows_plain(draw_rows_plain, logits, parts).tolist()
    assert found == expected and found[1] == 9 and found[2] == -1
    assert launched == ["collect_kernel", "draw_kernel"]
    assert (
        sampling.sample_rows(logits.to(DEVICE), []).tolist() == sample_rows_plain(draw_rows_plain, logits, []).tolist()
    )


@pytest.mark.parametrize("vocab", [1, 50, 4096, 9000])
def test_from_the_whole_vocabulary_the_same_number_draws_the_same_token_as_plain(vocab):
    uniform = torch.tensor([0.0, 0.1, 0.4, 0.6, 0.97])
    logits = torch.randn(len(uniform), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    assert torch.equal(drawn_of_all(logits, uniform), draw(logits.double().softmax(-1), uniform[:, None].double()))


def test_a_banned_token_is_never_drawn_however_the_weights_are_summed():
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-24, 1 - 2**-24])
    logits = torch.full((len(uniform), 9000), -torch.inf)
    allowed = torch.arange(100, 8900, 2)
    logits[:-1, allowed] = torch.randn(len(allowed), generator=torch.Generator().manual_seed(0)) * 3
    logits[-1, 5] = -300.0
    found = drawn_of_all(logits, uniform)
    assert (logits.gather(1, found[:, None]) > -torch.inf).all()
    assert found[0] == 100, "nothing lies before the first token"
    assert found[-1] == 5


def test_broken_rows_of_the_whole_vocabulary_have_no_token():
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    uniform = torch.full((4,), 0.6)
    expected = draw(logits.softmax(-1), uniform[:, None])
    logits[0], logits[1, 3], logits[2, 5] = -torch.inf, torch.nan, torch.inf
    assert drawn_of_all(logits, uniform).tolist() == [ALL_TOKENS_BANNED, -1, -1, expected[3]]

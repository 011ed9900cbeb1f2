"""The low-rank products on a CPU against their plain twin, and that against a formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.low_rank import LowRankWeights, as_matrix, row_table
from engine.model.ops.lora.low_rank import add_plain
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.ops.lora.cases import Case

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
PROFILE = settings(max_examples=60, derandomize=True, deadline=None)
ROWS = st.lists(st.integers(-1, 2), min_size=1, max_size=20)


def cpu_add():
    from engine.model.ops.cpu.lora import low_rank as cpu

    return cpu.add


def test_the_plain_product_is_that_of_the_paper():
    case = Case.make([0, -1, 1], slices=(24, 8), ranks=(16, 32))
    (found,), (before,) = case.expected(), case.outs
    for row, slot in ((0, 0), (2, 1)):
        rank, weights = int(case.weights.ranks[slot]), case.weights
        a, b = as_matrix(weights.a[slot]).view(40, 2, 32)[:, :, :rank], as_matrix(weights.b[slot])
        for slice_, start, size, column in ((0, 0, 24, 0), (1, 24, 8, 32)):
            delta = b[:rank, column : column + size].T @ (a[:, slice_].T @ case.x[row])
            torch.testing.assert_close(found[row, start : start + size], before[row, start : start + size] + delta)
    assert torch.equal(found[1], before[1]) and torch.equal(found[:, 32:], before[:, 32:])


@needs_linear_kernel
@PROFILE
@given(
    rows=ROWS,
    slices=st.lists(st.sampled_from([1, 8, 16, 40, 130, 200]), min_size=1, max_size=3),
    inputs=st.sampled_from([8, 40, 96]),
    parts=st.sampled_from([1, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_the_cpu_kernel_equals_plain_and_gives_a_row_the_same_bits_alone(rows, slices, inputs, parts, dtype):
    case = Case.make(rows, inputs=inputs, slices=slices, parts=parts, dtype=dtype)
    found, expected = case.result(cpu_add()), case.expected()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for row in range(len(rows)):
        for one, alone in zip(found, case.result(cpu_add(), [row]), strict=True):
            assert torch.equal(one[row], alone[0])
    for row, slot in enumerate(rows):
        if slot in (-1, 2):  # no adapter, or one that leaves this layer alone
            assert all(torch.equal(one[row], out[row]) for one, out in zip(found, case.outs, strict=True))


@needs_linear_kernel
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [8, 40, 64])
def test_an_output_has_the_same_bits_if_a_rank_has_fewer_of_them(size, dtype):
    case = Case.make([0, 1, 1, 0, 1], slices=(200,), dtype=dtype)
    (whole,) = case.result(cpu_add())
    cut = LowRankWeights.allocate(3, 40, [size], 32, dtype, case.x.device)
    cut.a, cut.ranks = case.weights.a, case.weights.ranks
    cut.b.copy_(case.weights.b[:, : cut.b.shape[1]])
    (part,) = replace(case, weights=cut, outs=[case.outs[0][:, :size]]).result(cpu_add())
    assert torch.equal(part, whole[:, :size])


@given(slots=st.lists(st.integers(-1, 5), min_size=1, max_size=60), size=st.sampled_from([1, 4, 16]))
def test_tiles_hold_each_row_with_an_adapter_once(slots, size):

    table = row_table(np.array(slots, dtype=np.int32), size).tolist()
    count = table[0]
    tiles, rows = [table[1 + 3 * i : 4 + 3 * i] for i in range(count)], table[1 + 3 * count :]
    found = {row: slot for slot, first, number in tiles for row in rows[first : first + number]}
    assert found == {row: slot for row, slot in enumerate(slots) if slot >= 0}
    assert sum(number for _, _, number in tiles) == len(found) and all(1 <= tile[2] <= size for tile in tiles)
    assert len(table) <= 1 + 4 * len(slots)


def test_nothing_happens_without_an_adapter():
    case = Case.make([-1, -1])
    assert all(torch.equal(one, out) for one, out in zip(case.result(add_plain), case.outs, strict=True))

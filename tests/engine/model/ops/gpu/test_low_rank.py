"""The Triton kernels of low-rank products against their plain twin."""

from __future__ import annotations

import pytest
import torch

from engine.model.ops.gpu import low_rank as gpu
from tests.engine.model.ops.gpu.paged import DEVICE
from tests.engine.model.ops.lora.cases import Case

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MIXED = [0, -1, 1, 1, 0, 2, -1, *[1] * 20]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("slices", "inputs", "parts"), [((130, 8, 8), 80, 1), ((40,), 64, 4)])
def test_low_rank_products_equal_plain(dtype, slices, inputs, parts):
    case = Case.make(MIXED, slices=slices, inputs=inputs, parts=parts, dtype=dtype, device=torch.device(DEVICE))
    found, expected = case.result(gpu.add, tile_rows=gpu.ROWS), case.expected()
    for one, other, out in zip(found, expected, case.outs, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for row in (1, 5, 6):  # no adapter, and one that leaves this layer alone
            assert torch.equal(one[row], out[row])


def test_a_row_has_the_same_result_alone():
    """To within what the interpreter's matrix product makes of a row's place in its tile."""
    case = Case.make(MIXED, device=torch.device(DEVICE))
    (whole,) = case.result(gpu.add, tile_rows=gpu.ROWS)
    for row in (0, 3, 12):
        (alone,) = case.result(gpu.add, [row], tile_rows=gpu.ROWS)
        torch.testing.assert_close(alone[0], whole[row], atol=1e-5, rtol=1e-5)


def test_steps_without_adapters_change_nothing():
    case = Case.make([-1, -1, -1], device=torch.device(DEVICE))
    assert torch.equal(case.result(gpu.add, tile_rows=gpu.ROWS)[0], case.outs[0])

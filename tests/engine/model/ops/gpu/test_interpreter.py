"""What the interpreter has to find."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the interpreter")


@triton.jit
def running_sum_kernel(x):
    """Grid (n). Wrong: program i reads what program i - 1 has written, or will write."""
    i = tl.program_id(0)
    before = tl.load(x + i - 1, mask=i > 0, other=0)
    tl.store(x + i, tl.load(x + i) + before)


def test_programs_that_rely_on_those_before_them_are_wrong():
    x = torch.ones(16, dtype=torch.int32)
    running_sum_kernel[(16,)](x)
    assert x.tolist() != list(range(1, 17))


@triton.jit
def copy_kernel(x, out, count, BLOCK: tl.constexpr):
    """Grid (count / BLOCK). Wrong: no mask keeps the last program within `x`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i), mask=i < count)


@triton.jit
def shifted_kernel(x, out, BEFORE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (1). Wrong: it writes before `out`, and counts behind it."""
    i = tl.arange(0, BLOCK)
    if BEFORE:
        tl.store(out + i - 1, tl.load(x + i))
    else:
        tl.atomic_add(out + i + 1, tl.load(x + i))


def test_a_row_behind_the_last_one_is_out_of_bounds():
    x, out = torch.ones(20), torch.zeros(32)
    copy_kernel[(1,)](x, out, 16, BLOCK=16)
    assert out.sum() == 16
    with pytest.raises(InterpreterError, match="12 of 16 addresses"):
        copy_kernel[(2,)](x, out, 20, BLOCK=16)


@pytest.mark.parametrize("before", [True, False])
def test_writes_and_counts_outside_a_tensor_are_out_of_bounds(before):
    with pytest.raises(InterpreterError, match="OutOfBounds"):
        shifted_kernel[(1,)](torch.ones(16), torch.zeros(16), BEFORE=before, BLOCK=16)

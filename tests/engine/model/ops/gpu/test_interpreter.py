"""What the interpreter has to find."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

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

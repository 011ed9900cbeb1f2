"""A row of a product has the same bits in any batch, and a sum of parts whoever holds them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model.ops import tree_sum
from engine.model.ops.gpu.strict import linear
from tests.engine.model.ops.gpu.paged import DEVICE

pytestmark = pytest.mark.kernels


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(200, 136, True), (64, 24, False)])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(inputs, outputs, bias, dtype):
    """Tiles have 128 rows and 128 outputs."""
    x, weight = random(150, inputs), random(outputs, inputs, seed=1)
    product, added = linear.Product(weight, dtype), random(outputs, seed=2) if bias else None
    whole = product(x, added)
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(whole, expected.to(dtype), atol=1e-4, rtol=0.016 if dtype == x.dtype else 1e-5)
    for first, rows in ((0, 1), (149, 1), (77, 2), (5, 17), (31, 33), (20, 129)):
        assert torch.equal(product(x[first : first + rows], added), whole[first : first + rows])
    assert torch.equal(product(x.repeat(1, 2)[:, :inputs], added), whole), "rows need not be contiguous"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_of_a_product_and_their_sum_have_the_same_bits_on_any_number_of_ranks(size):
    inputs, rows = 8 * 72, 5
    x, weight = random(rows, inputs), random(40, inputs, seed=1)
    expected = linear.linear_parts(x, weight, 8)
    own = [
        linear.linear_parts(part, columns.contiguous(), 8 // size)
        for part, columns in zip(x.chunk(size, 1), weight.chunk(size, 1), strict=True)
    ]
    assert torch.equal(torch.cat(own), expected)
    of_ranks = [linear.tree_sum(parts.unbind(), torch.float32) for parts in own]
    total = tree_sum.tree_sum_plain(of_ranks).to(x.dtype)
    assert torch.equal(total, tree_sum.tree_sum_plain(expected.float().unbind()).to(x.dtype))
    torch.testing.assert_close(total.float(), x.float() @ weight.float().T, atol=0.3, rtol=0.05)

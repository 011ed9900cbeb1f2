"""Products in AMX's registers, where a CPU has them. The other tests of linear layers then compute in them too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.devices.amx_permission import may_use_amx
from engine.devices.device import numba_found
from tests.cpu_kernels import needs_linear_kernel

pytestmark = [
    needs_linear_kernel,
    pytest.mark.skipif(not (numba_found() and may_use_amx()), reason="no AMX, or the system keeps it back"),
]


@pytest.mark.parametrize("inputs", [2, 30, 32, 34, 98, 768])
def test_any_number_of_inputs_and_rows_gives_the_sums_of_float32_and_the_same_bits_alone(inputs):
    from engine.model.ops.cpu import linear

    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(128, inputs, generator=generator).bfloat16()
    packed, bias = linear.pack(weight), torch.randn(128, generator=generator).bfloat16()
    for rows in (1, 2, 15, 16, 17, 33, linear.BLOCK_ROWS + 1):
        x = torch.randn(rows, 2 * inputs, generator=generator).bfloat16()[:, :inputs]  # rows are not adjacent
        wide, found = linear.multiply(x, packed, None, wide=True), linear.multiply(x, packed, bias)
        expected = x.float() @ weight.float().T
        torch.testing.assert_close(wide, expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(found.float(), expected + bias.float(), atol=2e-2, rtol=1e-2)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(linear.multiply(x[row : row + 1], packed, bias)[0], found[row])


def test_a_number_that_is_not_finite_stays_in_its_row():
    from engine.model.ops.cpu import linear

    x, packed = torch.ones(5, 64).bfloat16(), linear.pack(torch.ones(64, 64).bfloat16())
    x[3, 7] = float("nan")
    found = linear.multiply(x, packed, None)
    assert found[3].isnan().all()
    assert (found[[0, 1, 2, 4]] == 64).all()


def test_a_process_that_may_not_use_amx_computes_without_it_and_says_so_in_its_kind():
    """It has kernels of its own: those of another process would end it."""
    program = (
        "import torch; from engine.devices import amx_permission\n"
        "amx_permission.may_use_amx = lambda: False\n"
        "from engine.devices.device_kind import kind_of; from engine.model.ops.cpu import kernel, linear\n"
        "product = linear.multiply(torch.ones(3, 64).bfloat16(), linear.pack(torch.ones(64, 64).bfloat16()), None)\n"
        "print((product == 64).all().item(), 'AMX' in kind_of(torch.device('cpu')), kernel.SOURCES.endswith('-amx'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.split() == ["True", "False", "False"]

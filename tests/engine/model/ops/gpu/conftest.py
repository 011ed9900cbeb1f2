"""The Triton kernels run on a GPU where there is one, and elsewhere under Triton's interpreter, in random order and
within the memory of their tensors. tests/engine/conftest.py has chosen it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # it exists for Linux only
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def exact_interpreter():
    if torch.cuda.is_available():
        yield
        return
    from tests.engine.model.ops.gpu import interpreter

    interpreter.make_exact()
    interpreter.check_bounds()
    interpreter.shuffle_programs(seed=0)
    with np.errstate(all="ignore"):  # exp(1000), log(0) and inf - inf are no news on a GPU
        yield

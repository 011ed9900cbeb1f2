"""The Triton kernels run on a GPU where there is one, and elsewhere under Triton's interpreter, in random order and
within the memory of their tensors."""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # it exists for Linux only
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton looks at this variable when it is imported"
    os.environ["TRITON_INTERPRET"] = "1"


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

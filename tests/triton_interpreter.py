"""Triton's interpreter, in which kernels run on a machine without a GPU."""

from __future__ import annotations

import os
import sys

import torch


def use_interpreter() -> None:
    """Let kernels be interpreted where there is no GPU. Meant for a conftest.py: the folder's tests import Triton."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    assert "triton" not in sys.modules, "Triton looks at this variable when it is imported"
    os.environ["TRITON_INTERPRET"] = "1"

"""Under the interpreter, products of a tile do not depend on a row's place in it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def ordered_products(exact_interpreter, monkeypatch):
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder

        from tests.engine.model.ops.gpu import interpreter

        monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreter.ordered_dot)

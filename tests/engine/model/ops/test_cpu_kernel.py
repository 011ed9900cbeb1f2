"""How CPU kernels are compiled and found again."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.model.ops.cpu.kernel import as_f32, kernel, store


def entry(args: Any) -> None:
    store(as_f32(args[1]), 0, np.float32(1.0))


def test_a_kernel_that_was_just_compiled_is_loaded_as_other_processes_load_it(tmp_path, monkeypatch):
    """Compiled here and loaded, it has other instructions: an engine that starts first would give other bits."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(entry)().cache_hits == 1

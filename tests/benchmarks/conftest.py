"""The benchmarks of a GPU are rehearsed with interpreted kernels."""

from __future__ import annotations

from tests.triton_interpreter import use_interpreter

use_interpreter()

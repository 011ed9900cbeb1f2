"""What tests of the CPU's kernels have in common."""

from __future__ import annotations

import pytest

from engine.model.ops import linear

needs_linear_kernel = pytest.mark.skipif(linear.cpu_kernels() is None, reason="linear layers have no kernel of ours")

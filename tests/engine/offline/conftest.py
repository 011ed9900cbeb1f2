"""What the tests of the offline engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.model.ops import dispatch, linear
from tests.rank_pool import RankPool
from tests.sync_guard import forbid_waits
from tests.tape import TapedDevice, tape_kernels


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with RankPool() as pool:
        yield pool
    torch.set_num_threads(before)


@pytest.fixture
def late(monkeypatch) -> TapedDevice:
    """Takes the place of a GPU, for which the host may not wait while it launches steps."""
    device = TapedDevice()
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: device)
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr(linear, "cpu_kernels", lambda: None)  # a tape does not see what is no operation of torch
    forbid_waits(monkeypatch)
    tape_kernels(monkeypatch)
    return device

"""A few minutes of what `python -m benchmarks.soak` does for an hour."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import show_soak
from benchmarks.soak.soak import VICTIMS, soak


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")
def test_some_minutes_of_requests_cancels_and_kills_leave_a_server_as_it_was():
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp", ignore_cleanup_errors=True) as folder:
        found = asyncio.run(soak(Path(folder), seconds=220.0, warm_up_s=45.0, kill_s=20.0, clients=6))
    show_soak(found)  # for `pytest -s`
    assert found.problems() == []
    assert set(found.kills) == set(VICTIMS)
    assert min(found.visits.answered.values()) >= 3 and min(found.visits.left.values()) > 10

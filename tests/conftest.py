"""In which order tests run, with `pytest -n` in which process, what hypothesis tries, and what may be left behind."""

from __future__ import annotations

import os
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.left_behind", "tests.unchanged"]

# what hypothesis tries is the same in every run but those of `make test-all`, and no test fails because it was slow
settings.register_profile(
    "manta",
    derandomize="TEST_SEED" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("manta")


def pytest_configure(config: pytest.Config) -> None:
    """Give a process of `pytest -n`, and what it starts, one thread for each operation: there are no more cores."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With TEST_SEED, files come in an order of that seed, the same in every process of `pytest -n`. There, tests that
    wait for clusters come first, so that at the end no process waits for another."""
    if seed := os.environ.get("TEST_SEED"):
        items.sort(key=lambda item: zlib.crc32(f"{seed} {item.path.name} {item.path.parent.name}".encode()))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("serve") is None)


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of `pytest -n auto`: one for each core, and even on a single core two, since half
    of the time of a test is waiting for others to start. Each takes a GiB, and imports and collects everything."""
    return min(max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.by_server import ByServer

    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None

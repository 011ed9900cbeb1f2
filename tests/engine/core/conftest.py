"""Engines with a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.core.real_engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.models import make_model

    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request) -> bool:
    return request.param


@pytest.fixture
def make_engine(folder, overlap):
    from engine.assembly.build import build_engine
    from engine.clock import Clock
    from engine.config import EngineConfig
    from tests.engine.core.real_engine import Engine, FakeClock

    cores = []

    def make(wake=lambda: None, **options) -> Engine:
        defaults = {
            "block_size": 4,
            "num_gpu_blocks_override": 64,
            "max_num_seqs": 4,
            "num_threads": 1,
            "async_scheduling": overlap,
        }
        clock = FakeClock()
        config = EngineConfig(**{"model": str(folder), **defaults, **options})
        cores.append(build_engine(config, wake=wake, clock=Clock(clock.monotonic)))
        return Engine(cores[-1], clock)

    yield make
    for core in cores:
        core.close()


@pytest.fixture
def engine(make_engine) -> Iterator[Engine]:
    return make_engine()

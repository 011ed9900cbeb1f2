"""Engines that share experts: the first in this process, the others in those of a RankPool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.config import EngineConfig
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.offline.engine_group import EngineGroup, start_engines, start_rank
from engine.serving.server import EngineServer
from tests.rank_pool import TIMEOUT_S, RankPool


class Engines:
    """An EngineGroup as the tests of EngineCore use it."""

    def __init__(self, group: EngineGroup):
        self.group = group
        self.core = core = group._core
        self.model_config, self.scheduler = core.model_config, core.scheduler
        self.add, self.step, self.stats = group.add, group.step, group.stats

    @property
    def has_work(self) -> bool:
        return bool(self.group._live)


@contextmanager
def running(pool: RankPool, config: EngineConfig, **options: Any) -> Iterator[Engines]:
    options = {**group_options(config), "device": "cpu", **options}
    ranks = TPGroup.listen(config.world_size, **options)
    for rank in range(1, config.world_size):
        pool.call(rank, run_rank, config, rank, ranks.address, options)
    ranks.join(TIMEOUT_S)
    group = start_engines(config, ranks)
    try:
        yield Engines(group)
    finally:
        with ranks.starting():
            ranks.exchange("the test has ended")
        group.close()
    for rank in range(1, config.world_size):
        pool.answer(rank)


def run_rank(config: EngineConfig, rank: int, address: str, options: dict[str, Any]) -> None:
    ranks = TPGroup.connect(rank, config.world_size, address, TIMEOUT_S, **options)
    process = start_rank(config, ranks)
    serving = threading.Thread(target=process.run)
    serving.start()
    ranks.exchange("")  # until the test has ended
    if isinstance(process, EngineServer):  # it ends the workers of its engine
        process.stop()
    serving.join(TIMEOUT_S)

"""Processes that serve as ranks above 0, of one group after the other: torch is imported once for many tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable, ServingError
from tests.engine_processes import with_engine
from tests.processes import outlives_test

TIMEOUT_S = 30.0


class RankPool:
    """Rank 0 is this process."""

    def __init__(self) -> None:
        self._context = with_engine()
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def engine(self, config: EngineConfig, **options: Any) -> Iterator[EngineCore]:
        """An engine of `config.num_ranks` ranks. options: of TPGroup.connect."""
        size = config.num_ranks
        if size == 1:
            core = build_engine(config)
            yield core
            core.close()
            return
        options = {**group_options(config), "device": "cpu", **options}
        group = TPGroup.listen(size, **options)
        for rank in range(1, size):
            self.call(rank, run_worker, config, rank, group.address, options)
        group.join(TIMEOUT_S)
        core = build_engine(config, group)
        try:
            yield core
        finally:
            core.close()
        for rank in range(1, size):
            self.answer(rank)

    def call(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        """Start `function` there. `answer` has to follow."""
        while len(self._ranks) < rank:
            self._start()
        self._ranks[rank - 1][1].send((function, args))

    def answer(self, rank: int) -> None:
        """Wait until the call has ended; fails if it raised an error."""
        pipe = self._ranks[rank - 1][1]
        assert pipe.poll(TIMEOUT_S), f"rank {rank} did not end"
        error = pipe.recv()
        assert error is None, error

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks above 0."""
        return [process.pid for process, _ in self._ranks]

    def kill(self) -> None:
        """End the processes, whatever they do."""
        for process, _ in self._ranks:
            process.kill()
            process.join(TIMEOUT_S)

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.send(None)
            process.join(TIMEOUT_S)

    def _start(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(there,), daemon=True)
        process.start()
        outlives_test.add(process.pid)
        self._ranks.append((process, here))


def serve(pipe: Connection) -> None:
    """In a child: make the calls that come, and answer each with None or with what went wrong."""
    torch.set_num_threads(1)
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            function(*args)
            pipe.send(None)
        except ServingError as error:
            pipe.send(str(error))
    os._exit(0)  # without unloading torch, which takes most of a second


def run_worker(config: EngineConfig, rank: int, address: str, options: dict[str, Any]) -> None:
    group = TPGroup.connect(rank, config.num_ranks, address, TIMEOUT_S, **options)
    open_worker(config, group).run()


def check_imports() -> None:
    """Raise EngineUnavailable if the first engine of this process imports anything of what takes seconds."""
    before = {*sys.modules}
    config = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=8, max_model_len=64, num_threads=1)
    build_engine(config).close()
    packages = {name.partition(".")[0] for name in {*sys.modules} - before}
    if found := packages & {"engine", "torch", "transformers", "numba"}:
        raise EngineUnavailable(f"imports of {found}")

"""Ranks above 0 of an offline engine, as child processes. In a cluster, placement/ starts them as Ray actors.

A child is `python -m engine.offline.rank_processes`. It reads its task from stdin, and ends when stdin closes, which
always happens when the parent ends. (`spawn` of multiprocessing would run the user's script again in every child.)
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.errors import ServingError

if TYPE_CHECKING:
    from engine.distributed.tp_group import TPGroup

logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 120.0  # includes importing torch, perhaps from a cold disk
END_TIMEOUT_S = 5.0
FAILED = 1
PARENT_DIED = 2


class RankTask(msgspec.Struct, frozen=True):
    """Task of a child process, sent to its stdin."""

    rank: int
    address: str
    config: EngineConfig
    key: ClusterKey | None


class RankProcesses:
    """The child processes. The constructor starts them. If one of them dies, `group` loses it."""

    def __init__(self, config: EngineConfig, group: TPGroup, address: str):
        self._group = group
        self._closing = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, config.world_size):
                self._start(RankTask(rank, address, config, group.key))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the pipes, wait for the ranks to end, and kill those that do not end in END_TIMEOUT_S."""
        self._closing.set()
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank died before it read its task
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, task: RankTask) -> None:
        folder = str(Path(__file__).resolve().parents[__name__.count(".")])  # contains the outermost package
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: import nothing from the current folder
            stdin=subprocess.PIPE,
            # else torch would print a page about a lost connection when rank 0 ends first
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path},
        )
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
        threading.Thread(target=self._watch, args=(task.rank, process), name=f"rank {task.rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._closing.is_set():
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            self._group.abort(f"the process of rank {rank} {how}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends its ranks in order
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankTask)
    parent = Parent()
    threading.Thread(target=parent.wait, name="parent", daemon=True).start()
    logging.basicConfig(format=f"rank{task.rank} %(message)s", level=logging.WARNING)
    status = 0
    try:
        _run(task, parent)
    except ServingError as error:
        logger.error("rank %d ends: %s", task.rank, error)
        status = FAILED
    sys.stderr.flush()
    # exit at once: threads may still wait for other ranks, and unloading torch takes most of a second of CPU time
    os._exit(status)


def _run(task: RankTask, parent: Parent) -> None:
    import torch  # here, since it takes seconds in which the parent may die

    from engine.assembly.open_worker import open_worker
    from engine.distributed.group_options import group_options
    from engine.distributed.tp_group import TPGroup
    from engine.serving.server import EngineServer

    config = task.config
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(task.rank)
    group = TPGroup.connect(
        task.rank, config.world_size, task.address, RENDEZVOUS_TIMEOUT_S, key=task.key, **group_options(config)
    )
    if config.data_parallel_size == 1:
        open_worker(config, group).run()
        return
    from engine.offline.engine_group import start_rank  # here, since engines of one rank do without pyzmq

    process = start_rank(config, group)
    if isinstance(process, EngineServer):  # it ends the workers of its engine
        parent.at_end(process.stop)
    process.run()


class Parent:
    """The parent process, with which this one ends."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._at_end: Callable[[], None] = lambda: None

    def at_end(self, call: Callable[[], None]) -> None:
        """Register a function that ends this process in order."""
        self._at_end = call
        if self._ended.is_set():
            call()

    def wait(self) -> None:
        """Wait for the parent to end, and then end this process."""
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._ended.set()
        self._at_end()
        # after a delay: rank 0 ends the broadcast before it closes the pipe, so an orderly end may be under way
        threading.Timer(END_TIMEOUT_S / 2, os._exit, (PARENT_DIED,)).start()


if __name__ == "__main__":
    main()

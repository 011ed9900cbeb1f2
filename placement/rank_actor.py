"""Ray actor around one rank, in a process of its own, so that HTTP and scheduling never share a GIL."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray

from engine.black_box import BLACK_BOX, box_path, remove_orphans
from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.source_digest import engine_version
from placement.console_log import LogConfig, log_to_console
from placement.cpu_share import threads_on
from placement.cuda_device import device_index
from placement.rank_order import RACK_LABELS, RankLocation

if TYPE_CHECKING:  # torch takes seconds to import, and processes that start ranks do not need it
    from engine.distributed.tp_group import ConnectedGroup, TPGroup
    from engine.runner.worker import Worker
    from engine.serving.server import EngineServer

logger = logging.getLogger(__name__)

RAYLET_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineTask:
    engine_id: str
    status_to: str  #: ZMQ address to which the engine reports


@dataclass(frozen=True, slots=True)
class RankTask:
    """Task that all ranks of one replica share."""

    config: EngineConfig
    replica: str  #: name of the replica in logs
    engines: Sequence[EngineTask]  #: one, or several that share experts
    timeout_s: float  #: seconds for the ranks to find each other
    log: LogConfig
    key: ClusterKey  #: cluster key of its sockets and those of other replicas


@dataclass(frozen=True, slots=True)
class RankReady:
    """Answer of the first rank of an engine once all ranks have loaded."""

    address: str  #: ZMQ address on which the engine takes commands
    max_model_len: int


class RankActor:
    """Hosts an engine on its first rank, and a worker on its other ranks. A dead rank is never restarted: its replica
    is replaced."""

    def __init__(self) -> None:
        # else torch would print a page about a lost connection when rank 0 ends first
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._group: ConnectedGroup | None = None
        self._process: EngineServer | Worker
        threading.Thread(target=_end_with_raylet, args=(os.getppid(),), daemon=True).start()

    def location(self) -> RankLocation:
        """Return where Ray has placed this actor."""
        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", []))
        labels = context.get_node_labels()
        rack = tuple(labels.get(name) for name in RACK_LABELS)
        return RankLocation(context.get_node_id(), devices, ray.util.get_node_ip_address(), rack)

    def version(self) -> str:
        """Return the version of the code that this process runs."""
        return engine_version()

    def listen(self, task: RankTask, host: str) -> str:
        """Listen as rank 0 of several, and return the address to which the other ranks connect. host: address at which
        they reach it."""
        from engine.distributed.group_options import group_options
        from engine.distributed.tp_group import TPGroup

        config = task.config
        _take_device(config)
        self._group = TPGroup.listen(config.world_size, host, key=task.key, **group_options(config))
        return self._group.address

    def start(self, task: RankTask, rank: int, rank_0: str) -> RankReady | None:
        """Load this rank's shards of the model, and return when all ranks have loaded. Raises the StartupError of any
        rank.

        rank_0: address of rank 0, if there are several ranks.
        """
        log_to_console(f"{task.replica}/rank{rank}", task.log)
        location = self.location()
        logger.info(
            "rank starts pid=%d node=%s host=%s gpus=%s",
            os.getpid(), location.node, location.host, ",".join(location.devices) or None,
        )  # fmt: skip
        _open_black_box(task.replica, rank)
        _take_device(task.config)
        from engine.distributed.data_parallel.data_parallel_group import engine_group

        config = task.config
        if not location.devices:
            config = replace(config, num_threads=threads_on(location.node, config.num_threads))
        group = engine_group(config, self._join(task, rank, rank_0))
        engine, rank_of_engine = divmod(rank, config.num_ranks)
        if rank_of_engine == 0:
            return self._lead(config, task.engines[engine], group, location.host)
        self._follow(config, group, location.host)
        return None

    def run(self) -> None:
        """Serve until the process ends. Until this call returns, the rank group knows that the rank is alive.

        Raises EngineUnavailable when another rank dies.
        """
        self._process.run()
        BLACK_BOX.close()

    def _join(self, task: RankTask, rank: int, rank_0: str) -> TPGroup:
        """Return all ranks of the replica, once they have joined."""
        from engine.distributed.group_options import group_options
        from engine.distributed.tp_group import TPGroup

        config = task.config
        if config.world_size == 1:
            return TPGroup.single(task.key)
        if self._group is not None:
            self._group.join(task.timeout_s)
            return self._group
        return TPGroup.connect(rank, config.world_size, rank_0, task.timeout_s, key=task.key, **group_options(config))

    def _lead(self, config: EngineConfig, engine: EngineTask, group: TPGroup, host: str) -> RankReady:
        from engine.serving.server import EngineServer

        server = EngineServer(config, engine_id=engine.engine_id, status_to=engine.status_to, host=host, group=group)
        self._process = server
        return RankReady(server.address, server.max_model_len)

    def _follow(self, config: EngineConfig, group: TPGroup, host: str) -> None:
        from engine.assembly.open_worker import open_worker

        self._process = open_worker(config, group, host)


def _take_device(config: EngineConfig) -> None:
    """Make the GPU that Ray gave this actor the current one, before anything creates a CUDA context."""
    import torch

    from engine.devices.device import is_gpu

    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if gpus and is_gpu(config.device):
        torch.cuda.set_device(device_index(gpus[0], os.environ.get("CUDA_VISIBLE_DEVICES")))


def _open_black_box(replica: str, rank: int) -> None:
    """Record what this rank does. Without shared memory, requests that end engines are only limited by their number of
    replays."""
    path = box_path(replica, rank)
    remove_orphans(path.parent)
    try:
        BLACK_BOX.open(path)
    except OSError as error:
        logger.warning("nobody will know what this rank did if it dies: %s", error)


def _end_with_raylet(raylet: int) -> None:
    """End this process, which frees its GPU, once the raylet that started it has died. Ray itself would wait for
    `run`."""
    while os.getppid() == raylet:
        time.sleep(RAYLET_INTERVAL_S)
    logger.error("the raylet of this node has died, and this rank ends with it")
    os._exit(1)

"""Tensor-parallel group.

The ranks of one model form a group like this:

    rank 0       group = TPGroup.listen(size, host)     the others are given group.address
                 group.join(timeout_s)
    rank 1, ...  group = TPGroup.connect(rank, size, address, timeout_s)

Groups share no state, not even torch's default group, so a process can have several.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.devices.device import is_gpu
from engine.distributed.process_group import Collectives, ProcessGroup, gloo, nccl
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError

if TYPE_CHECKING:  # it needs pyzmq, which a single rank does without
    from engine.distributed.cluster_key import ClusterKey

logger = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 1800.0  # long: one rank may have its weights long before another
POLL_INTERVAL_S = 0.01
STORE_TIMEOUT = timedelta(seconds=10)  # for one answer of rank 0
LOCAL_COLLECTIVES = {"cpu": ".local.cpus", "cuda": ".local.gpus"}
"""Functions by kind of device. Each returns faster collectives of ranks that are all on one machine, given their group,
their process ids, and a function that opens those of torch.distributed."""


class TPGroup:
    """The ranks that share one model. This base class has one rank, for which every collective is the identity."""

    local_size = 1  #: ranks on this machine
    host = "127.0.0.1"  #: address at which the other ranks reach this one
    stage = 0  #: number of their pipeline stage

    def __init__(self, rank: int, size: int, key: ClusterKey | None = None):
        """key: cluster key of this engine's sockets, which other engines must have; None admits all peers."""
        self.rank, self.size, self.key = rank, size, key
        self.all_ranks: TPGroup = self  #: the ranks of all stages
        self.all_engines: TPGroup = self  #: those of all engines that share experts
        self.expert_ranks: TPGroup = self  #: those that have the experts of this rank's layers

    @staticmethod
    def single(key: ClusterKey | None = None) -> TPGroup:
        return TPGroup(rank=0, size=1, key=key)

    @staticmethod
    def listen(size: int, host: str = "127.0.0.1", port: int = 0, **options: Any) -> ConnectedGroup:
        """Return rank 0 of a group, listening at `address`; `join` completes it. port: 0 takes any free port.

        options: as for `connect`.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)  # TCPStore would listen on all interfaces
        port = listener.getsockname()[1]
        file = listener.detach()
        store = dist.TCPStore(host, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=file)
        return ConnectedGroup(0, size, store, host, f"{host}:{port}", GroupOptions(**options))

    @staticmethod
    def connect(rank: int, size: int, address: str, timeout_s: float, **options: Any) -> ConnectedGroup:
        """Join the group whose rank 0 listens at `address` (host:port).

        options: fields of GroupOptions. Raises RendezvousTimeout, which names the missing ranks, or StartupError if
        another rank failed.
        """
        deadline = time.monotonic() + timeout_s
        host, _, port = address.rpartition(":")
        while True:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                with socket.create_connection((host, int(port)), timeout=left_s) as probe:
                    own_host = probe.getsockname()[0]  # the interface through which rank 0 is reached
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RendezvousTimeout([0], size, timeout_s, f"{address}: {error}") from None
                time.sleep(POLL_INTERVAL_S)
        with _lost_rank_0():
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        group = ConnectedGroup(rank, size, store, own_host, address, GroupOptions(**options))
        group.join(deadline - time.monotonic())
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, with the same bits on every rank. May overwrite `x`."""
        return x

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of all parts of all ranks, which have as many each. May overwrite them."""
        (part,) = parts
        return self.all_reduce(part)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate every rank's `x` along the last dimension, in rank order."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of `x[rank]`, where `rank` is this rank. x: [size, ...]."""
        return x[0]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Send rows to each rank, and return those that have come, by sender. x: [rows, ...], by receiver. counts:
        numbers of rows, by sender and receiver."""
        return x

    def exchange(self, value: str, timeout_s: float = LOADING_TIMEOUT_S) -> list[str]:
        """Return every rank's value, in rank order. Meant for the start, since it polls.

        Raises RendezvousTimeout, which names the missing ranks, or StartupError if another rank failed.
        """
        return [value]

    def process_group(self, name: str, timeout_s: float, *, on_hosts: bool = False) -> Any:
        """Connect to the other ranks once more, by a process group of torch.distributed, for messages beside the
        collectives. Every rank has to call this. name: unlike those of other process groups. on_hosts: whether tensors
        in host memory are sent, also between GPUs. Raises StartupError."""
        raise NotImplementedError("one rank has nobody to write to")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Make an error inside the block end the start of all ranks, not only of this rank."""
        yield

    def before_close(self, release: Callable[[], None]) -> None:
        """Register `release`, which `close` calls first. NCCL can end only once no CUDA graph holds one of its
        collectives."""

    def on_abort(self, call: Callable[[str], None]) -> None:
        """Register a function that `abort` is to call, with its reason."""

    def abort(self, reason: str) -> None:
        """Make every present and future wait for other ranks raise. May be called from any thread."""

    def close(self) -> None:
        """Release connections and memory, without notifying the other ranks."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How ranks connect."""

    device: str = "auto"  #: `auto`, `cpu` or `cuda`
    shared_memory: bool = True  #: False uses only gloo or NCCL, even on one machine
    collectives: bool = True  #: False connects only the store, for ranks that then form a group per stage (stages/)
    key: ClusterKey | None = None  #: cluster key, the same on all ranks


class ConnectedGroup(TPGroup):
    """Several ranks, each in its own process.

    CPUs of one machine use shared memory, CPUs of several machines gloo, and GPUs NCCL; GPUs of one machine use
    symmetric memory as well. Gloo, NCCL and the store at which ranks meet neither encrypt nor authenticate anything:
    the network between ranks must be trusted (docs/security.md).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        host: str,
        address: str,
        options: GroupOptions,
        parent: ConnectedGroup | None = None,
    ):
        """parent: the group of which this is a part; a failure to join also ends the parent's start."""
        super().__init__(rank, size, options.key)
        self.host, self.address, self._options = host, address, options
        self._store: dist.Store | None = store
        self._failures: dist.Store = store if parent is None else parent._failures
        self._cuda = is_gpu(options.device)
        self._aborts: list[Callable[[str], None]] = []
        self._collectives: Collectives | None = None
        self._releases: list[Callable[[], None]] = []
        self._exchanges = 0
        self._broken: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `connect` for a group like this one."""
        return {"device": self._options.device, "shared_memory": self._options.shared_memory, "key": self.key}

    def join(self, timeout_s: float) -> None:
        """Wait for all ranks and connect to them. Raises RendezvousTimeout, or another rank's StartupError."""
        deadline = time.monotonic() + timeout_s
        with self.starting():
            answers = self.exchange(json.dumps([self.size, _machine(), os.getpid()]), timeout_s)
            sizes, machines, pids = zip(*map(json.loads, answers), strict=True)
            if set(sizes) != {self.size}:
                raise StartupError(f"the ranks were given different group sizes: {sizes}")
            self.local_size = machines.count(_machine())
            if self.size > 1 and self._options.collectives:
                self._collectives = self._connect(list(pids), deadline)
                self._check_sum()
        logger.info(
            "ranks joined size=%d local=%d over=%s", self.size, self.local_size, type(self._collectives).__name__
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._running().all_reduce(x) if self.size > 1 else x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._running().all_gather(x).unbind(), dim=-1) if self.size > 1 else x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._running().reduce_scatter(x) if self.size > 1 else x[0]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        return self._running().all_to_all(x, counts) if self.size > 1 else x

    def exchange(self, value: str, timeout_s: float = LOADING_TIMEOUT_S) -> list[str]:
        deadline = time.monotonic() + timeout_s
        self._exchanges += 1
        keys = [f"exchange/{self._exchanges}/{rank}" for rank in range(self.size)]
        missing = list(range(self.size))
        with _lost_rank_0():
            store = self._open_store()
            store.set(keys[self.rank], value)
            while True:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                if not missing:
                    return [store.get(key).decode() for key in keys]
                self.check_others()
                if time.monotonic() > deadline:
                    raise RendezvousTimeout(missing, self.size, timeout_s, self.address)
                time.sleep(POLL_INTERVAL_S)

    def check_others(self) -> None:
        """Raise StartupError if another rank has failed, or this group has been aborted."""
        self._open_store()
        with _lost_rank_0():
            failed = self._failures.get("failed").decode() if self._failures.check(["failed"]) else None
        if failed is not None:
            raise StartupError(failed)
        if self._broken is not None:
            raise StartupError(self._broken)

    @contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._store is not None:
                try:
                    if not self._failures.check(["failed"]):
                        self._failures.set("failed", f"rank {self.rank}: {str(error) or type(error).__name__}")
                except RuntimeError:  # rank 0 is gone, and no rank is left to tell
                    logger.warning("rank %d could not report its failure to the other ranks", self.rank)
            raise

    def before_close(self, release: Callable[[], None]) -> None:
        self._releases.append(release)

    def part(self, name: str, rank: int, size: int, **options: Any) -> ConnectedGroup:
        """Return a group of some of these ranks, still to be joined. The calling rank is its rank `rank` of `size`.
        options: of `connect`, where they differ from those of this group. `abort` and `close` of this group act on the
        new one too."""
        store = self.store(name)
        address = f"{self.address} {name}"  # another name, since symmetric memory is found by it
        group = ConnectedGroup(rank, size, store, self.host, address, GroupOptions(**{**self.options, **options}), self)
        self._aborts.append(group.abort)
        self.before_close(group.close)
        return group

    def on_hosts(self, timeout_s: float) -> ConnectedGroup:
        """Return a group of the same ranks whose collectives take tensors in host memory. Every rank has to call this.
        Raises RendezvousTimeout, or another rank's StartupError."""
        if not self._cuda:
            return self
        hosts = self.part("hosts", self.rank, self.size, device="cpu")
        hosts.join(timeout_s)
        return hosts

    def process_group(self, name: str, timeout_s: float, *, on_hosts: bool = False) -> Any:
        connect = nccl if self._cuda and not on_hosts else gloo
        try:
            return connect(self.store(name), self.rank, self.size, self.host, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StartupError(f"rank {self.rank} could not connect to the other ranks: {error}") from error

    def store(self, name: str) -> dist.Store:
        """Return a part of the store at which these ranks meet."""
        return dist.PrefixStore(name, self._open_store())

    def on_abort(self, call: Callable[[str], None]) -> None:
        self._aborts.append(call)

    def abort(self, reason: str) -> None:
        self._broken = reason
        for call in self._aborts:
            call(reason)
        if self._collectives is not None:
            self._collectives.abort(reason)

    def close(self) -> None:
        for release in self._releases:
            release()
        if self._collectives is not None:
            self._collectives.close()
        self._collectives = self._store = None

    def _open_store(self) -> dist.Store:
        if self._store is None:
            raise EngineUnavailable(self._broken or "the group of ranks is closed")
        return self._store

    def _running(self) -> Collectives:
        if self._collectives is None or self._broken is not None:
            raise EngineUnavailable(self._broken or "the group of ranks is closed")
        return self._collectives

    def _connect(self, pids: list[int], deadline: float) -> Collectives:
        def plain() -> ProcessGroup:
            timeout_s = max(1.0, deadline - time.monotonic())
            return ProcessGroup(self.process_group("collectives", timeout_s), self.size)

        if not self._options.shared_memory or self.local_size < self.size:
            return plain()
        connect = import_module(LOCAL_COLLECTIVES["cuda" if self._cuda else "cpu"], __package__).connect
        collectives: Collectives = connect(self, pids, plain)
        return collectives

    def _check_sum(self) -> None:
        """Check one sum. This also makes NCCL connect."""
        device = "cuda" if self._cuda else "cpu"
        total = self.all_reduce(torch.tensor([2**self.rank], dtype=torch.float32, device=device))
        assert total.item() == 2**self.size - 1, "the ranks' first sum is wrong"


def _machine() -> str:
    """Return a name that is equal for processes that can share memory and address each other by process id."""
    if sys.platform != "linux":
        return socket.gethostname()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])


@contextmanager
def _lost_rank_0() -> Iterator[None]:
    """Raise StartupError for errors of the store, which lives in rank 0."""
    try:
        yield
    except RuntimeError as error:
        raise StartupError(f"rank 0 cannot be reached: {error}") from error

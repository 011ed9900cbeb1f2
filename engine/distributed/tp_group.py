"""Tensor-parallel group: the only file that imports torch.distributed.

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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from engine.devices.device import is_gpu, numba_found
from engine.distributed import symmetric_memory
from engine.distributed.collectives import Collectives
from engine.distributed.exchange.expert_exchange import ExpertExchange
from engine.distributed.symmetric_memory import SIZES, SymmetricMemory, open_symmetric_memory
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError

if TYPE_CHECKING:  # the last two need pyzmq, which a single rank does without
    from engine.distributed.cluster_key import ClusterKey
    from engine.distributed.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 120.0  # long, although ranks do equal work: a first step may compile kernels
LOADING_TIMEOUT_S = 1800.0  # long: one rank may have its weights long before another
POLL_INTERVAL_S = 0.01
STORE_TIMEOUT = timedelta(seconds=10)  # for one answer of rank 0


class TPGroup:
    """The ranks that share one model. This base class has one rank, for which every collective is the identity."""

    local_size = 1  #: ranks on this machine
    host = "127.0.0.1"  #: address at which the other ranks reach this one
    stage = 0  #: number of their pipeline stage
    link_copies = 0.0  #: hidden states of whole steps that their links to other stages keep at a time
    expert_exchange: ExpertExchange | None = None  #: with the ranks of other engines that share experts

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
        group = TPGroup.reach(rank, size, address, timeout_s, **options)
        group.join(deadline - time.monotonic())
        return group

    @staticmethod
    def reach(rank: int, size: int, address: str, timeout_s: float, **options: Any) -> ConnectedGroup:
        """Connect to rank 0 of a group; `join` completes it. The arguments and errors are those of `connect`."""
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
        return ConnectedGroup(rank, size, store, own_host, address, GroupOptions(**options))

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

    def mailbox(self, timeout_s: float) -> Mailbox:
        """Connect to the other ranks once more, for messages beside the collectives. Every rank has to call this.
        Raises StartupError."""
        raise NotImplementedError("one rank has nobody to write to")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Make an error inside the block end the start of all ranks, not only of this rank."""
        yield

    def before_close(self, release: Callable[[], None]) -> None:
        """Register `release`, which `close` calls first. NCCL can end only once no CUDA graph holds one of its
        collectives."""

    def abort(self, reason: str) -> None:
        """Make every present and future wait for other ranks raise. May be called from any thread."""

    def lose(self, rank: int, reason: str) -> None:
        """Record that the process of another rank has ended. May be called from any thread."""
        self.abort(reason)

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
        self._parts: list[ConnectedGroup] = []
        self._collectives: Collectives | None = None
        self._releases: list[Callable[[], None]] = []
        self._exchanges = 0
        self._broken: str | None = None
        self._goes_on: Callable[[int, str], bool] = lambda rank, reason: False

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
                self._check_others()
                if time.monotonic() > deadline:
                    raise RendezvousTimeout(missing, self.size, timeout_s, self.address)
                time.sleep(POLL_INTERVAL_S)

    def check_joined(self) -> None:
        """Raise StartupError if this group has been left or aborted."""
        if self._broken is not None:
            raise StartupError(self._broken)

    def _check_others(self) -> None:
        """Raise StartupError if another rank has failed."""
        self._open_store()
        if self._failures.check(["failed"]):
            raise StartupError(self._failures.get("failed").decode())
        self.check_joined()

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
        options: of `connect`, where they differ from those of this group. `leave`, `abort` and `close` of this group
        act on the new one too. Raises StartupError if this group has been left."""
        store = dist.PrefixStore(name, self._open_store())
        address = f"{self.address} {name}"  # another name, since symmetric memory is found by it
        group = ConnectedGroup(rank, size, store, self.host, address, GroupOptions(**{**self.options, **options}), self)
        self._parts.append(group)
        self._aborts.append(group.abort)
        self.before_close(group.close)
        self.check_joined()
        return group

    def on_hosts(self, timeout_s: float) -> ConnectedGroup:
        """Return a group of the same ranks whose collectives take tensors in host memory. Every rank has to call this.
        Raises RendezvousTimeout, or another rank's StartupError."""
        if not self._cuda:
            return self
        hosts = self.part("hosts", self.rank, self.size, device="cpu")
        hosts.join(timeout_s)
        return hosts

    def peers(self, timeout_s: float) -> Any:
        """Return a process group of torch.distributed through which these ranks can send to each other."""
        return self._process_group("peers", timeout_s, nccl if self._cuda else gloo)

    def mailbox(self, timeout_s: float) -> Mailbox:
        mail = Mailbox(self._process_group("mailbox", timeout_s, gloo))
        self.on_abort(mail.abort)
        return mail

    def _process_group(self, name: str, timeout_s: float, connect: Callable[..., Any]) -> Any:
        store = dist.PrefixStore(name, self._open_store())
        try:
            return connect(store, self.rank, self.size, self.host, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StartupError(f"rank {self.rank} could not connect to the other ranks: {error}") from error

    def on_abort(self, call: Callable[[str], None]) -> None:
        """Register a function that `abort` is to call, with its reason."""
        self._aborts.append(call)

    def on_loss(self, goes_on: Callable[[int, str], bool]) -> None:
        """Register a function that `lose` calls with its arguments. It returns whether the others go on."""
        self._goes_on = goes_on

    def lose(self, rank: int, reason: str) -> None:
        if not self._goes_on(rank, reason):
            self.abort(reason)

    def leave(self, reason: str) -> None:
        """End the collectives of these ranks, or the attempt to join them. Present and future waits of this rank raise,
        and so do those of other ranks that need this one. May be called from any thread."""
        self._broken = reason
        for part in self._parts:
            part.leave(reason)
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            collectives.abort(reason)
            collectives.close()

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
        if not self._cuda and self._options.shared_memory and self.local_size == self.size and numba_found():
            shared = self._share_memory(pids)
            if shared is not None:
                return shared
        timeout_s = max(1.0, deadline - time.monotonic())
        group = self._process_group("collectives", timeout_s, nccl if self._cuda else gloo)
        plain = ProcessGroup(group, self.size)
        if self._cuda and self._options.shared_memory and self.local_size == self.size and self.size in SIZES:
            return self._share_gpu_memory(plain, group)
        return plain

    def _share_gpu_memory(self, plain: ProcessGroup, group: Any) -> Collectives:
        """Return collectives over symmetric memory if it works on all ranks, else `plain`."""
        store, name = dist.PrefixStore("symmetric memory", self._open_store()), f"manta {self.address}"
        opened = partial(open_symmetric_memory, plain, group, store, self.rank, self.size, name)
        return symmetric_memory.share_if_all_can(plain, opened, self._all_can, self._check_shared)

    def _check_shared(self, shared: SymmetricMemory) -> str:
        """Return the result of `shared.check`, or raise StartupError if another rank keeps it waiting."""
        with _lost_rank_0():
            return symmetric_memory.check_in_thread(shared, self.rank, self._check_others, COLLECTIVE_TIMEOUT_S)

    def _all_can(self, problem: str) -> bool:
        """Return whether no rank reports a problem with shared memory. problem: this rank's, or ""."""
        problems = [text for text in self.exchange(problem) if text]
        if problems:
            logger.warning("ranks on one machine use no shared memory, because it is unavailable: %s", problems[0])
        return not problems

    def _share_memory(self, pids: list[int]) -> SharedMemory | None:
        """Return collectives over shared memory, or None unless all ranks can share it."""
        from engine.distributed.shared_memory import SharedMemory  # importing it compiles code

        shared, problem, path = None, "", ""
        try:
            if self.rank == 0:
                shared = SharedMemory(0, pids, None, COLLECTIVE_TIMEOUT_S)
                path = shared.path
        except OSError as error:
            problem = str(error)
        path = self.exchange(path)[0]
        try:
            if self.rank and path:
                shared = SharedMemory(self.rank, pids, path, COLLECTIVE_TIMEOUT_S)
        except OSError as error:
            problem = str(error)
        all_can = self._all_can(problem)
        if shared is not None:
            shared.close_file()
        return shared if all_can else None

    def _check_sum(self) -> None:
        """Check one sum. This also makes NCCL connect."""
        device = "cuda" if self._cuda else "cpu"
        total = self.all_reduce(torch.tensor([2**self.rank], dtype=torch.float32, device=device))
        assert total.item() == 2**self.size - 1, "the ranks' first sum is wrong"


class ProcessGroup:
    """Collectives of torch.distributed."""

    def __init__(self, group: Any, size: int):
        self._group, self._size = group, size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL runs in the layers' stream, without events to and from another
        self._run(lambda: self._group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        out = x.new_empty(self._size * flat.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        self._run(lambda: self._group._allgather_base(out, flat, options))
        return out.view(self._size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        out = x.new_empty(flat.numel() // self._size)
        options = ReduceScatterOptions()
        options.asyncOp = False
        self._run(lambda: self._group._reduce_scatter_base(out, flat, options))
        return out.view(x.shape[1:])

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        sent, received = counts[self._group.rank()], [row[self._group.rank()] for row in counts]
        out = x.new_empty(sum(received), *x.shape[1:])
        options = AllToAllOptions()
        options.asyncOp = False
        self._run(lambda: self._group.alltoall_base(out, x.contiguous(), received, list(sent), options))
        return out

    def abort(self, reason: str) -> None:
        """Abort NCCL in a separate thread. Its kernels end at once, but the call blocks until no CUDA graph holds a
        collective (`commDestroySync`). A wait in gloo ends when the other rank's connection ends, or at its timeout."""
        threading.Thread(target=self._group.abort, name="abort", daemon=True).start()

    def close(self) -> None:
        """Do nothing: connections close with the last reference."""

    def _run(self, collective: Callable[[], dist.Work | None]) -> None:
        try:
            work = collective()
            if work is not None:  # None if it runs in the caller's stream
                work.wait()
        except RuntimeError as error:
            raise EngineUnavailable(f"a collective failed, perhaps because another rank has died: {error}") from error


class Mailbox:
    """Sends tensors in host memory from rank to rank, by gloo. The messages of one rank to another arrive in order.
    Tensors must be contiguous, and must live until the wait has ended."""

    def __init__(self, group: Any):
        self._group, self._broken = group, ""

    def send(self, x: Tensor, rank: int) -> dist.Work:
        return self._open().send([x.view(-1).view(torch.uint8)], rank, 0)

    def receive(self, x: Tensor, rank: int) -> dist.Work:
        return self._open().recv([x.view(-1).view(torch.uint8)], rank, 0)

    def abort(self, reason: str) -> None:
        """Close this rank's connections, which ends the waits of others for it. Nothing in gloo ends a wait of this
        rank, which ends when the other rank closes its connections. May be called from any thread."""
        self._broken, self._group = reason, None

    def _open(self) -> Any:
        if (group := self._group) is None:
            raise EngineUnavailable(self._broken)
        return group


def gloo(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()  # the only way to choose the network interface
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    group = kind(store, rank, size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return group


def nccl(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)


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

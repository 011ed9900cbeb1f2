"""KV blocks through torch.distributed: NCCL between GPUs, gloo between CPUs (where tests run it).

Requests go over TCP connections as in tcp.py; each connection has a process group of its own, of two ranks, through
which the blocks come. They land in a tensor of the reader and are copied into the cache from there, since a receive
cannot be taken back: one that is given up stays behind with its tensor, until its group is gone.

Neither NCCL nor gloo has checksums.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.tp_group import gloo, nccl
from engine.kv_transfer.transport.base import TICK_S, BlockReads, Layout, Progress, TransportError
from engine.kv_transfer.transport.memory import BlockMemory
from engine.kv_transfer.transport.tcp import FRAME, TcpSource, ask, connect, cut, receive_header, send, shut_down

logger = logging.getLogger(__name__)

SOURCE, READER = 0, 1  # ranks of a pair


class NcclDescription(msgspec.Struct, frozen=True, array_like=True):
    """port: for requests. store_port: of the TCPStore where the two of a pair meet. device: `cuda` or `cpu`."""

    host: str
    port: int
    store_port: int
    key: bytes
    device: str
    layout: Layout


@dataclass(slots=True, eq=False)
class Pair:
    """A connection to a source, and the process group that belongs to it, once there is one."""

    connection: socket.socket
    group: Any = None

    def close(self) -> None:
        shut_down(self.connection)
        self.connection.close()
        if self.group is not None:
            with suppress(RuntimeError):  # broken already
                self.group.abort()


class NcclTransport:
    """progress_s: how long either side waits for the other."""

    name = "nccl"

    def __init__(self, memory: BlockMemory, host: str, progress_s: float):
        """host: an IP address of this machine. Raises OSError if it is not."""
        self._memory, self._host, self._progress_s = memory, host, progress_s
        key = secrets.token_bytes(16)
        self._source = NcclSource(memory, host, key, progress_s)
        self._description = msgspec.msgpack.encode(
            NcclDescription(host, self._source.port, self._source.store_port, key, memory.device.type, memory.layout)
        )
        self._lock = threading.Lock()
        self._idle: defaultdict[bytes, list[Pair]] = defaultdict(list)
        self._busy: defaultdict[bytes, set[Pair]] = defaultdict(set)

    def describe(self) -> bytes:
        return self._description

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        remote = msgspec.msgpack.decode(source, type=NcclDescription)
        size = reads.check(remote.layout, self._memory.layout)
        if remote.device != self._memory.device.type:
            raise TransportError(f"nccl needs the same kind of device: {remote.device} there, not here")
        if not reads.local:
            return 0
        progress = Progress(stop, self._progress_s)
        pair: Pair | None = None
        try:
            with self._lock:
                pair = self._idle[source].pop() if self._idle[source] else None
            if pair is None:
                pair = Pair(connect(remote.host, remote.port, progress))
            with self._lock:
                self._busy[source].add(pair)
            self._receive(pair, remote, reads, size, progress)
        except BaseException as error:
            if pair is not None:
                with self._lock:
                    if source in self._busy:
                        self._busy[source].discard(pair)
                pair.close()
            if isinstance(error, OSError | RuntimeError):  # RuntimeError: of torch.distributed
                raise TransportError(f"link to {remote.host} failed: {error}") from error
            raise
        with self._lock:
            kept = pair in self._busy.get(source, ())  # and not dropped meanwhile
            if kept:
                self._busy[source].discard(pair)
                self._idle[source].append(pair)
        if not kept:
            pair.close()
        return size * len(reads.local)

    def drop(self, source: bytes) -> None:
        with self._lock:
            pairs = [*self._idle.pop(source, []), *self._busy.pop(source, set())]
        for pair in pairs:
            pair.close()

    def close(self) -> None:
        for source in {*self._idle, *self._busy}:
            self.drop(source)
        self._source.close()

    def _receive(self, pair: Pair, remote: NcclDescription, reads: BlockReads, size: int, progress: Progress) -> None:
        ask(pair.connection, remote.key, reads, progress)
        number, _, _ = receive_header(pair.connection, progress)
        frames = list(cut(reads.local, size))
        came: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()

        def receive() -> None:
            """In a thread of its own, since a receive cannot be taken back."""
            limit = timedelta(seconds=self._progress_s)
            try:
                if pair.group is None:
                    pair.group = make_group(
                        remote.host, remote.store_port, number, READER, self._host, remote.device, limit
                    )
                for blocks in frames:
                    with self._memory.apart():
                        tensor = torch.empty(size * len(blocks), dtype=torch.uint8, device=self._memory.device)
                        pair.group.recv([tensor], SOURCE, 0).wait(limit)  # NCCL: only the queue may wait here
                    self._memory.settle(self._progress_s)
                    came.put(tensor)
            except Exception as error:  # noqa: BLE001 - raised where it is taken out
                came.put(error)

        threading.Thread(target=receive, name="kv receive", daemon=True).start()
        for blocks in frames:
            while True:
                progress.check()
                with suppress(queue.Empty):
                    tensor = came.get(timeout=TICK_S)
                    break
            if isinstance(tensor, Exception):
                raise tensor
            progress.made()
            self._memory.scatter(blocks, reads.part.local_start, reads.part.count, tensor)


class NcclSource(TcpSource):
    """Takes requests as TcpSource does, and answers through a process group."""

    def __init__(self, memory: BlockMemory, host: str, key: bytes, progress_s: float):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)  # TCPStore would listen on all interfaces
        self.store_port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, self.store_port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._host, self._limit = host, timedelta(seconds=progress_s)
        self._groups: dict[socket.socket, Any] = {}
        self._made = 0
        super().__init__(memory, host, key, progress_s)

    def _deliver(
        self, connection: socket.socket, progress: Progress, blocks: list[int], start: int, count: int, seed: int
    ) -> None:
        group = self._groups.get(connection)
        with self._lock:
            self._made += 1
            number = self._made
        send(connection, [memoryview(FRAME.pack(number, 0, 0))], progress)
        try:
            if group is None:
                kind = self._memory.device.type
                group = make_group(self._host, self.store_port, number, SOURCE, self._host, kind, self._limit)
                self._groups[connection] = group
            for some in cut(blocks, self._memory.layout.piece_bytes(count)):
                with self._memory.apart():
                    group.send([self._memory.gather_tensor(some, start, count)], READER, 0).wait(self._limit)
                self._memory.settle(self._limit.total_seconds())
        except RuntimeError as error:  # of torch.distributed
            raise TransportError(f"the reader takes nothing: {error}") from error

    def _ended(self, connection: socket.socket) -> None:
        group = self._groups.pop(connection, None)
        if group is not None:
            with suppress(RuntimeError):  # broken already
                group.abort()


def make_group(
    store_host: str, store_port: int, number: int, rank: int, host: str, device: str, limit: timedelta
) -> Any:
    """Both ends of a pair call it. Raises RuntimeError when the other does not come within `limit`."""
    # of its own: one that waits on a store for a partner holds up all others on it
    store = dist.TCPStore(store_host, store_port, is_master=False, wait_for_workers=False, timeout=limit)
    make = nccl if device == "cuda" else gloo
    return make(dist.PrefixStore(f"pair/{number}", store), rank, 2, host, limit)

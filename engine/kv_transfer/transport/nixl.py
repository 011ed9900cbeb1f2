"""NIXL transport (UCX): shared memory, RDMA or NVLink, as UCX finds between the two. Optional package.

Transfers write to buffers of the transport's own, which are copied into the cache. A transfer under way cannot be
taken back for sure: when its peer hangs, it may still write later. It then keeps its buffer, and the
blocks of the cache are free at once. Reads share MAX_BUFFERS, for which the cache leaves memory; each read may have one
of any size, and only those of transfers that hang or fail come on top. The copy takes 0.4 of the time of
the transfer itself (CPU, 16 MB, two processes of one machine).

NIXL itself has no checksums; the links that it uses do.

Every call of NIXL comes from a thread with a CUDA context where the cache is on a GPU: in one without, UCX leaves out
NVLink (vLLM #36475) or crashes. NIXL's own progress thread has none (nixl #2102), so a thread of this module takes its
place there. Neither has run on a GPU yet.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_transfer.transport.base import BlockReads, Layout, Progress, TransportError, runs
from engine.kv_transfer.transport.memory import BlockMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # per transfer: small enough that a slow link shows progress
MAX_TRANSFERS = 4  # of one read under way at a time
MAX_BUFFERS = 8  # of all reads, which tens of prefill engines may make at a time
POLL_S = 0.0001
PROGRESS_US = 10_000  # interval at which NIXL's thread makes progress even if UCX has not asked to
OWN_PROGRESS_S = 0.001  # interval of our thread, which UCX cannot wake
RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlDescription(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a rank, as others reach it."""

    metadata: bytes  #: of its NIXL agent
    address: int  #: of the cache there
    segment: str  #: kind of memory, as NIXL calls it
    device: int
    layout: Layout


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer to a buffer, from which its pieces go to local blocks."""

    handle: Any
    buffer: Tensor
    blocks: list[int]


class NixlTransport:
    name = "nixl"

    def __init__(self, memory: BlockMemory, progress_s: float):
        """Raises TransportError if NIXL or its UCX backend is not available."""
        self._memory, self._progress_s = memory, progress_s
        self._segment = "VRAM" if memory.device.type == "cuda" else "DRAM"
        self._device = memory.device.index or 0
        self._lock = threading.Lock()  # guards the NIXL agent and all below
        warn_if_memory_cannot_be_pinned()
        memory.enter_thread()
        self._agent = start_agent(progress_thread=not memory.needs_context)
        with self._calling():
            self._registered = [self._register(memory.tensor)]
            metadata = self._agent.get_agent_metadata()
        description = NixlDescription(metadata, memory.tensor.data_ptr(), self._segment, self._device, memory.layout)
        self._description = msgspec.msgpack.encode(description)
        self._peers: dict[bytes, bytes] = {}  # NIXL's name by description
        self._free: list[Tensor] = []
        self._left: list[Transfer] = []  # given up, but they may still write to their buffers
        self._lost: list[
            Transfer
        ] = []  # failed: whether they still write is never known, so their buffers are not used again
        self._closing = threading.Event()
        self._progress_thread = threading.Thread(target=self._make_progress, name="kv nixl progress", daemon=True)
        if memory.needs_context:
            self._progress_thread.start()

    def describe(self) -> bytes:
        return self._description

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        remote = msgspec.msgpack.decode(source, type=NixlDescription)
        size = reads.check(remote.layout, self._memory.layout)
        progress = Progress(stop, self._progress_s)
        pieces = cut(reads, max(1, PIECE_BYTES // size))
        transfers: deque[Transfer] = deque()
        piece = next(pieces, None)
        try:
            with self._calling():
                self._reclaim()
                peer = self._peer(source)
            while transfers or piece is not None:
                progress.check()
                if piece is not None and len(transfers) < MAX_TRANSFERS:
                    with self._calling():
                        if has_buffers := not transfers or self._buffers_in_use < MAX_BUFFERS:
                            transfers.append(self._start(peer, remote, piece, size))
                    if has_buffers:
                        piece = next(pieces, None)
                        continue
                if self._done(transfers[0]):
                    progress.made()
                    self._copy_to_cache(transfers[0], reads, size)
                    transfers.popleft()
                else:
                    stop.wait(POLL_S)
        finally:
            with self._lock:
                self._left.extend(transfers)
        return size * len(reads.local)

    def drop(self, source: bytes) -> None:
        try:
            with self._calling():
                peer = self._peers.pop(source, None)
                if peer is not None:
                    self._agent.remove_remote_agent(peer)
        except TransportError as error:
            logger.warning("a peer that is forgotten here may be known to NIXL still: %s", error)

    def close(self) -> None:
        self._closing.set()
        if self._progress_thread.is_alive():
            self._progress_thread.join()
        with self._calling():
            if self._agent is None:
                return
            for transfer in (*self._left, *self._lost):
                release(transfer.handle)
            for registration in self._registered:
                with suppress(TransportError), nixl_errors():  # all ends with the agent in any case
                    self._agent.deregister_memory(registration)
            self._agent = None  # the last reference: ends its threads and connections, before its buffers go
            self._left, self._lost, self._free = [], [], []

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Hold the lock, in a thread that may call NIXL. Raises its errors as TransportError."""
        self._memory.enter_thread()
        with nixl_errors(), self._lock:
            yield

    def _make_progress(self) -> None:
        while not self._closing.wait(OWN_PROGRESS_S):
            with suppress(TransportError), self._calling():  # a read under way meets the error itself
                self._agent.get_new_notifs()

    # -- with the lock -------------------------------------------------------------------------------------

    def _register(self, tensor: Tensor) -> Any:
        region = (tensor.data_ptr(), tensor.nbytes, self._device, "")
        return self._agent.register_memory([region], self._segment)

    def _peer(self, source: bytes) -> bytes:
        if source not in self._peers:
            metadata = msgspec.msgpack.decode(source, type=NixlDescription).metadata
            self._peers[source] = self._agent.add_remote_agent(metadata)
        return self._peers[source]

    def _start(self, peer: bytes, remote: NixlDescription, piece: BlockReads, size: int) -> Transfer:
        there = addresses(remote, piece)
        buffer = self._free.pop() if self._free else self._new_buffer()
        here = there.copy()
        here[:, 0] = buffer.data_ptr() + np.cumsum(there[:, 1]) - there[:, 1]
        here[:, 2] = self._device
        try:
            local = self._agent.get_xfer_descs(here, self._segment)
            source = self._agent.get_xfer_descs(there, remote.segment)
            handle = self._agent.initialize_xfer("READ", local, source, peer)
        except BaseException:
            self._free.append(buffer)  # nothing will write to it
            raise
        transfer = Transfer(handle, buffer, piece.local)
        try:
            if self._agent.transfer(handle) == "ERR":
                raise TransportError("NIXL could not start a transfer")
        except BaseException:
            self._lost.append(transfer)
            raise
        return transfer

    @property
    def _buffers_in_use(self) -> int:
        """The number of those that reads under way hold."""
        return len(self._registered) - 1 - len(self._free) - len(self._left) - len(self._lost)

    def _new_buffer(self) -> Tensor:
        size = buffer_bytes(self._memory.layout.piece_bytes(self._memory.layout.heads))
        with self._memory.apart():
            buffer = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        self._registered.append(self._register(buffer))
        return buffer

    def _reclaim(self) -> None:
        """Take back the buffers of transfers that were given up, once they are complete."""
        left, self._left = self._left, []
        for transfer in left:
            state = "ERR"
            with suppress(TransportError), nixl_errors():
                state = self._agent.check_xfer_state(transfer.handle)
            if state == "PROC":
                self._left.append(transfer)
            elif state == "DONE" and release(transfer.handle):
                self._free.append(transfer.buffer)
            else:
                self._lost.append(transfer)
                logger.warning("NIXL: a transfer failed, %d buffers are lost by now", len(self._lost))

    # ------------------------------------------------------------------------------------------------------

    def _done(self, transfer: Transfer) -> bool:
        with self._calling():
            state = self._agent.check_xfer_state(transfer.handle)
        if state == "ERR":
            raise TransportError("NIXL: the transfer failed")
        return bool(state == "DONE")

    def _copy_to_cache(self, transfer: Transfer, reads: BlockReads, size: int) -> None:
        part = reads.part
        data = transfer.buffer[: size * len(transfer.blocks)]
        self._memory.scatter(transfer.blocks, part.local_start, part.count, data)
        with self._calling():
            if release(transfer.handle):
                self._free.append(transfer.buffer)
            else:
                self._lost.append(transfer)


def buffer_bytes(block_bytes: int) -> int:
    """Return the size of a buffer, for a cache with blocks of `block_bytes`."""
    return max(PIECE_BYTES, block_bytes)


def warn_if_memory_cannot_be_pinned() -> None:
    """Log a warning if this machine has RDMA that UCX may not use: it then goes over TCP and says nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()):
        logger.warning("RDMA needs RLIMIT_MEMLOCK unlimited, got %d KiB: KV may go over TCP", limit // 1024)


def start_agent(*, progress_thread: bool) -> Any:
    """Return a NIXL agent with a UCX backend. progress_thread: whether NIXL starts one."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportError(f"the package cannot be imported: {error}") from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    name = f"manta-{uuid.uuid4().hex}"
    with nixl_errors():
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        # nixl_agent has its thread poll without a pause, which took 22 % of a busy core from the model, all the time
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = progress_thread, PROGRESS_US
        config.syncMode = api.nixlBind.NIXL_THREAD_SYNC_NONE
        agent.agent = api.nixlBind.nixlAgent(name, config)
        agent.create_backend("UCX")
    return agent


def cut(reads: BlockReads, step: int) -> Iterator[BlockReads]:
    for first in range(0, len(reads.local), step):
        yield BlockReads(reads.remote[first : first + step], reads.local[first : first + step], reads.part)


def addresses(remote: NixlDescription, reads: BlockReads) -> NDArray[np.uint64]:
    """Return what to read as [pieces, (address, bytes, device)], in the order of the blocks.

    Whole blocks next to each other are one piece: 16 MB in 16 KB pieces take 15.9 ms, in large ones 2.1 ms.
    """
    layout, part = remote.layout, reads.part
    block_bytes = layout.piece_bytes(layout.heads)
    if part.count == layout.heads:
        found = [(reads.remote[i] * block_bytes, n * block_bytes) for i, n in runs(reads.remote)]
        starts, sizes = np.array(found, np.uint64).T
    else:
        blocks = np.array(reads.remote, np.uint64)[:, None] * block_bytes
        slabs = np.arange(layout.slabs, dtype=np.uint64)[None, :] * (layout.heads * layout.head_bytes)
        starts = (blocks + slabs).reshape(-1) + part.remote_start * layout.head_bytes
        sizes = np.full_like(starts, part.count * layout.head_bytes)
    out = np.empty((len(starts), 3), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = remote.address + starts, sizes, remote.device
    return out


def release(handle: Any) -> bool:
    """Release a transfer. Returns False if it is still under way."""
    with suppress(TransportError), nixl_errors():
        handle.release()
        return True
    return False


@contextmanager
def nixl_errors() -> Iterator[None]:
    """Raise NIXL's errors, which have no common base, as TransportError."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"NIXL: {error} ({type(error).__name__})") from error

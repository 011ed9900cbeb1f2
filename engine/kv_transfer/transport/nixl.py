"""NIXL transport (UCX): shared memory, RDMA or NVLink, whichever UCX finds between two ranks. Optional package.

Transfers write to the transport's own buffers, which are then copied into the cache. A running transfer cannot be
cancelled reliably: if its peer hangs, it may still write later. Such a transfer keeps its buffer, while the blocks of
the cache are free at once. All reads share MAX_BUFFERS buffers, and the size of the cache leaves memory for them. A
read that has none gets one even if all are in use, and transfers that hang or fail keep theirs in addition. The copy
takes 0.4 times as long as the transfer itself (CPU, 16 MB, two processes of one machine).

NIXL has no checksums of its own; the links that it uses do.

If the cache is on a GPU, every call of NIXL must come from a thread with a CUDA context: without one, UCX leaves out
NVLink (vLLM #36475) or crashes. NIXL's own progress thread has none (nixl #2102), so a thread of this module replaces
it.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.kv_transfer.transport.base import BlockReads, CacheLayout, TransferProgress, TransportError, runs
from engine.kv_transfer.transport.memory import BlockMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # per transfer: small enough that a slow link shows progress
MAX_TRANSFERS = 4  # concurrent ones of one read
MAX_BUFFERS = 8  # of all reads together: there may be tens of concurrent ones
POLL_S = 0.0001
PROGRESS_US = 10_000  # interval at which NIXL's thread makes progress even if UCX has not asked to
OWN_PROGRESS_S = 0.001  # polling interval of our progress thread, which UCX cannot wake
DEVICES = "UCX_NET_DEVICES"
LOOPBACK = "lo"  # the only network device for ranks of one machine; shared memory and NVLink are no such devices
RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlDescription(msgspec.Struct, frozen=True, array_like=True):
    """What other ranks need to read the memory of a rank."""

    metadata: bytes  #: metadata of its NIXL agent
    address: int  #: address of the cache in its process
    segment: str  #: NIXL's name for the kind of memory
    device: int
    layout: CacheLayout


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer to a buffer, whose pieces are then copied to local blocks."""

    handle: Any
    buffer: Tensor
    blocks: list[int]


class NixlTransport:
    name = "nixl"

    def __init__(self, memory: BlockMemory, progress_s: float, host: str):
        """host: IP address at which others reach this rank. Raises TransportError if NIXL or its UCX backend is not
        available."""
        self._memory, self._progress_s = memory, progress_s
        self._segment = "VRAM" if memory.device.type == "cuda" else "DRAM"
        self._device = memory.device.index or 0
        self._lock = threading.Lock()  # guards the NIXL agent and all fields below
        warn_if_memory_cannot_be_pinned()
        memory.enter_thread()
        self._agent = start_agent(host, progress_thread=not memory.needs_context)
        with self._calling():
            self._registered = [self._register(memory.tensor)]
            metadata = self._agent.get_agent_metadata()
        description = NixlDescription(metadata, memory.tensor.data_ptr(), self._segment, self._device, memory.layout)
        self._description = msgspec.msgpack.encode(description)
        self._peers: dict[bytes, bytes] = {}  # NIXL's name for a peer, by description
        self._free: list[Tensor] = []
        self._left: list[Transfer] = []  # given up, but may still write to their buffers
        self._lost: list[Transfer] = []  # failed: they may still write at any time, so their buffers are never reused
        self._closing = threading.Event()
        self._progress_thread = threading.Thread(target=self._make_progress, name="kv nixl progress", daemon=True)
        if memory.needs_context:
            self._progress_thread.start()

    def describe(self) -> bytes:
        return self._description

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        remote = msgspec.msgpack.decode(source, type=NixlDescription)
        size = reads.check(remote.layout, self._memory.layout)
        progress = TransferProgress(stop, self._progress_s)
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
            logger.warning("NIXL may not have forgotten a peer: %s", error)

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
                with suppress(TransportError), nixl_errors():  # the end of the agent cleans up in any case
                    self._agent.deregister_memory(registration)
            self._agent = None  # drops the last reference: its threads and connections end before its buffers are freed
            self._left, self._lost, self._free = [], [], []

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Hold the lock, in a thread that is able to call NIXL. Raises NIXL's errors as TransportError."""
        self._memory.enter_thread()
        with nixl_errors(), self._lock:
            yield

    def _make_progress(self) -> None:
        while not self._closing.wait(OWN_PROGRESS_S):
            with suppress(TransportError), self._calling():  # a read in progress gets the error itself
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
        """Number of buffers held by reads in progress."""
        return len(self._registered) - 1 - len(self._free) - len(self._left) - len(self._lost)

    def _new_buffer(self) -> Tensor:
        size = buffer_bytes(self._memory.layout.block_bytes)
        with self._memory.apart():
            buffer = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        self._registered.append(self._register(buffer))
        return buffer

    def _reclaim(self) -> None:
        """Take back the buffers of abandoned transfers that have completed."""
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
                logger.warning("NIXL: a transfer failed; %d buffers have been lost so far", len(self._lost))

    # ------------------------------------------------------------------------------------------------------

    def _done(self, transfer: Transfer) -> bool:
        with self._calling():
            state = self._agent.check_xfer_state(transfer.handle)
        if state == "ERR":
            raise TransportError("NIXL: the transfer failed")
        return bool(state == "DONE")

    def _copy_to_cache(self, transfer: Transfer, reads: BlockReads, size: int) -> None:
        data = transfer.buffer[: size * len(transfer.blocks)]
        self._memory.scatter(transfer.blocks, reads.local_region(self._memory.layout), data)
        with self._calling():
            if release(transfer.handle):
                self._free.append(transfer.buffer)
            else:
                self._lost.append(transfer)


def reserved_bytes(config: EngineConfig, block_bytes: Iterable[int], device: torch.device) -> int:
    """Return the memory of a GPU that an engine leaves free for transfer buffers. block_bytes: of each cache."""
    if device.type != "cuda" or config.handoff is None or config.handoff.transport == "tcp":
        return 0
    return MAX_BUFFERS * sum(map(buffer_bytes, block_bytes))


def buffer_bytes(block_bytes: int) -> int:
    """Return the size of a transfer buffer for a cache with blocks of `block_bytes`."""
    return max(PIECE_BYTES, block_bytes)


def warn_if_memory_cannot_be_pinned() -> None:
    """Log a warning if this machine has RDMA but UCX may be unable to use it: UCX then falls back to TCP."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()):
        logger.warning("RDMA needs RLIMIT_MEMLOCK unlimited, got %d KiB: KV may go over TCP", limit // 1024)


def start_agent(host: str, *, progress_thread: bool) -> Any:
    """Return a NIXL agent with a UCX backend.

    host: IP address at which others reach this rank. progress_thread: whether NIXL starts its own progress thread.
    """
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportError(f"the package cannot be imported: {error}") from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    name = f"manta-{uuid.uuid4().hex}"
    with nixl_errors():
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        # nixl_agent lets its thread poll without a pause, which constantly took 22 % of a busy core from the model
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = progress_thread, PROGRESS_US
        config.syncMode = api.nixlBind.NIXL_THREAD_SYNC_NONE
        agent.agent = api.nixlBind.nixlAgent(name, config)
        with devices_of(host):
            agent.create_backend("UCX")
    return agent


@contextmanager
def devices_of(host: str) -> Iterator[None]:
    """Inside the block, have UCX use only the loopback device if others reach this rank only there. Else it listens
    on the addresses of all devices. NIXL's own option for that knows RDMA devices only."""
    if DEVICES in os.environ or not ip_address(host).is_loopback:
        yield
        return
    os.environ[DEVICES] = LOOPBACK
    try:
        yield
    finally:
        del os.environ[DEVICES]


def cut(reads: BlockReads, step: int) -> Iterator[BlockReads]:
    for first in range(0, len(reads.local), step):
        yield replace(reads, remote=reads.remote[first : first + step], local=reads.local[first : first + step])


def addresses(remote: NixlDescription, reads: BlockReads) -> NDArray[np.uint64]:
    """Return the memory to read as [pieces, (address, bytes, device)], in block order.

    Adjacent whole blocks are one piece: 16 MB take 15.9 ms in pieces of 16 KB, and 2.1 ms in large ones.
    """
    layout, region = remote.layout, reads.remote_region(remote.layout)
    block_bytes = layout.block_bytes
    if region == layout.whole:
        found = [(reads.remote[i] * block_bytes, n * block_bytes) for i, n in runs(reads.remote)]
        starts, sizes = np.array(found, np.uint64).T
    else:
        blocks = np.array(reads.remote, np.uint64)[:, None] * block_bytes
        slabs = np.arange(region.slab, region.slab + region.slabs, dtype=np.uint64)[None, :]
        starts = (blocks + slabs * (layout.heads * layout.head_bytes)).reshape(-1) + region.head * layout.head_bytes
        sizes = np.full_like(starts, region.heads * layout.head_bytes)
    out = np.empty((len(starts), 3), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = remote.address + starts, sizes, remote.device
    return out


def release(handle: Any) -> bool:
    """Release a transfer. Returns False if it is still running."""
    with suppress(TransportError), nixl_errors():
        handle.release()
        return True
    return False


@contextmanager
def nixl_errors() -> Iterator[None]:
    """Reraise NIXL's errors, which have no common base class, as TransportError."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"NIXL: {error} ({type(error).__name__})") from error

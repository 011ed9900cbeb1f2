"""KV worker of a rank: lets other ranks read its KV cache, and reads remote blocks into it on command."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from torch import Tensor

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.refusals import REFUSALS, Counts
from engine.distributed.sockets import PullSocket
from engine.errors import StartupError
from engine.kv_transfer.protocol.messages import (
    Attach,
    DropSource,
    KVWorkerAnswer,
    KVWorkerCommand,
    RankRefusals,
    Read,
    ReadEnded,
)
from engine.kv_transfer.transport.base import STOPPED, BlockReads, KVTransport, TransportError
from engine.kv_transfer.transport.head_map import HeadShard, overlap, parts
from engine.kv_transfer.transport.memory import BlockMemory
from engine.kv_transfer.transport.tcp import TcpTransport

logger = logging.getLogger(__name__)

HELD = "layers"  # key of a rank's HeldLayers in its description
POLL_MS = 200  # after which `close` is noticed, at the latest


class HeldLayers(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells of the layers in its caches."""

    stage: int
    layers: list[tuple[int, int]]
    """[first, stop) in each KV cache group."""


@dataclass(slots=True, eq=False)
class PeerState:
    """Another engine, of one epoch, from which this rank reads."""

    epoch: int
    waiting: deque[ReadTask] = field(default_factory=deque)  #: tasks after the one that `thread` works on
    thread: threading.Thread | None = None
    transport: str | None = None  #: transport of the newest read, for the log
    failed: set[str] = field(default_factory=set)  #: transports that have failed
    descriptions: set[tuple[str, int, bytes]] = field(default_factory=set)
    """(transport, KV cache group, description of the source rank) in use."""


@dataclass(slots=True, eq=False)
class ReadTask:
    read: Read
    peer: PeerState
    stop: threading.Event = field(default_factory=threading.Event)


class KVTransferWorker:
    """KV worker of one rank. Its threads serve from the moment it is created.

    Commands (KVWorkerCommand, msgpack) come to a ZMQ PULL socket at `address`: Attach first, then Read, StopRead and
    DropSource. One ReadEnded answers every Read. Reads from one peer are sequential. Reads from different peers are
    concurrent, so a peer that hangs delays no other.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        *,
        shards: Sequence[HeadShard],
        layers: Sequence[range] | None = None,
        stage: int = 0,
        host: str = "127.0.0.1",
        transport: str = "auto",
        progress_s: float = 5.0,
        key: ClusterKey | None = None,
    ):
        """caches: one per KV cache group, [num_blocks, layers, parts, kv_heads, block_size, head_dim], as allocated by
        engine/runner/kv_cache.py.
        shards: the heads in each cache.
        layers: the layers in each cache, counted within the whole model's KV cache group. None for all. A cache may
            have none.
        stage: number of the rank's pipeline stage.
        host: IP address at which others reach this rank.
        transport: `auto` offers nixl, if available, and tcp; any other value offers only that transport.
        progress_s: seconds without received bytes after which a read fails.
        key: cluster key, shared with all processes that command this worker, read from it or are read by it.
        Raises StartupError if the transport is not available."""
        for cache, shard in zip(caches, shards, strict=True):
            if cache.shape[3] != shard.stop - shard.start:
                raise ValueError(f"the cache has {cache.shape[3]} heads, but its shard has {shard.stop - shard.start}")
        self._shards, self._key = shards, key
        self._layers = [range(cache.shape[1]) for cache in caches] if layers is None else layers
        self._parts = [cache.shape[2] for cache in caches]
        self._rank = stage * shards[0].size + shards[0].rank  # among all ranks of the engine
        #: transports of each group, by name; none for a cache without layers
        self._transports = [
            open_transports(BlockMemory(c), host, transport, progress_s, key) if c.numel() else {} for c in caches
        ]
        #: descriptions of this rank's memory by transport and group, for TransferProgress.ranks
        self.description = {
            key_of(name, group): transport.describe()
            for group, transports in enumerate(self._transports)
            for name, transport in transports.items()
        }
        held = HeldLayers(stage, [(layers.start, layers.stop) for layers in self._layers])
        self.description[HELD] = msgspec.msgpack.encode(held)
        self._context = zmq.Context()
        self._commands: PullSocket[KVWorkerCommand] = PullSocket(
            self._context, host, KVWorkerCommand, name="kv_worker_commands", key=key
        )
        self.address = self._commands.address
        self._reported: Counts = {}  # this rank's refusals as last reported to rank 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # guards all fields below
        self._answers: zmq.Socket[bytes] | None = None
        self._tasks: dict[int, ReadTask] = {}  # by read id, until answered
        self._peers: dict[int, PeerState] = {}  # by epoch
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv worker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop all reads by and from this worker. Answers to reads may be lost."""
        self._closing.set()
        self._thread.join()
        with self._lock:
            threads = {task.peer.thread for task in self._tasks.values()}
            for task in list(self._tasks.values()):
                self._stop(task)
        for thread in filter(None, threads):
            thread.join()
        for transport in (transport for group in self._transports for transport in group.values()):
            transport.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._commands.socket.poll(POLL_MS)
            for command in self._commands.messages():
                try:
                    self._do(command)
                except Exception as error:  # noqa: BLE001 - it is logged
                    self._commands.refuse("unexpected", f"{type(command).__name__}: {error!r}")
            if self._rank > 0:  # rank 0 is in the process of the channel, which sees the counts itself
                self._tell_refusals()

    def _do(self, command: KVWorkerCommand) -> None:
        dropped: set[tuple[str, int, bytes]] = set()
        with self._lock:
            if isinstance(command, Attach):
                self._attach(command.reply_to)
            elif isinstance(command, Read):
                self._start(command)
            elif isinstance(command, DropSource):
                dropped = self._drop(command.source_epoch)
            elif command.read_id in self._tasks:  # else the read has just ended
                self._stop(self._tasks[command.read_id])
        for name, group, description in dropped:
            self._transports[group][name].drop(description)

    def _tell_refusals(self) -> None:
        counts = REFUSALS.counts()
        with self._lock:
            if counts != self._reported and self._answers is not None:
                self._reported = counts
                self._answer(RankRefusals(self._rank, counts))

    def _work(self, peer: PeerState) -> None:
        """Run the peer's tasks in order, in a thread, until none are left."""
        while True:
            with self._lock:
                if not peer.waiting:
                    peer.thread = None
                    return
                task = peer.waiting.popleft()
            ended = self._read(task)
            with self._lock:
                self._end(task, ended)

    def _read(self, task: ReadTask) -> ReadEnded:
        read, peer, started = task.read, task.peer, time.monotonic()
        num_bytes, error, name = 0, None, ""
        try:
            name = self._choose(peer, read.ranks)
            key = key_of(name, read.group)
            stages = stages_of(read.ranks, read.group)
            found = [(ranks, overlap(self._layers[read.group], held)) for ranks, held in stages]
            wanted = [(ranks, layers) for ranks, layers in found if layers is not None]
            if sum(layers.count for _, layers in wanted) != len(self._layers[read.group]):
                raise TransportError(f"the source does not hold each layer of KV cache group {read.group} once")
            for ranks, layers in wanted:
                if key not in self.description or not all(key in rank for rank in ranks):
                    raise TransportError(f"KV cache group {read.group} cannot be read by {name}")
                for part in parts(self._shards[read.group], len(ranks)):
                    description = ranks[part.source_rank][key]
                    with self._lock:  # so that no task of a dropped peer registers it again
                        if task.stop.is_set():
                            raise TransportError(STOPPED)
                        peer.descriptions.add((name, read.group, description))
                    blocks = read.source_blocks, read.local_blocks
                    reads = BlockReads(*blocks, part, layers, self._parts[read.group])
                    num_bytes += self._transports[read.group][name].read(description, reads, task.stop)
        except (TransportError, ValueError, msgspec.MsgspecError) as problem:  # the last two: the command is wrong
            error = STOPPED if task.stop.is_set() else str(problem)
            logger.info("kv read ended read_id=%d transport=%s: %s", read.read_id, name, error)
        except Exception as problem:
            logger.exception("kv read failed read_id=%d", read.read_id)
            error = f"internal error: {problem!r}"
        if name and error not in (None, STOPPED):
            peer.failed.add(name)
        return ReadEnded(read.read_id, self._rank, name, num_bytes, time.monotonic() - started, error)

    def _choose(self, peer: PeerState, ranks: list[dict[str, bytes]]) -> str:
        """Return the best transport that both sides have, preferring those that have not failed."""
        if not ranks:
            raise TransportError("a source has at least one rank")
        own = next(filter(None, self._transports))
        offered = [{key.partition("/")[0] for key in rank if key != HELD} for rank in ranks]
        common = [name for name in own if all(name in names for names in offered)]
        if not common:
            theirs = sorted(set().union(*offered))
            raise TransportError(f"no transport in common: {', '.join(own)} here, {', '.join(theirs)} there")
        name = next((name for name in common if name not in peer.failed), common[-1])
        if name != peer.transport:
            why = "both have it" if name == next(iter(own)) else "the other side offers no other transport"
            if peer.transport is not None:
                why = f"{peer.transport} has failed"
            logger.info("kv from epoch %x travels over %s: %s", peer.epoch, name, why)
            peer.transport = name
        return name

    # -- with the lock -------------------------------------------------------------------------------------

    def _attach(self, reply_to: str) -> None:
        if self._answers is not None:
            self._answers.close()
        self._answers = self._context.socket(zmq.PUSH)
        self._answers.setsockopt(zmq.SNDHWM, 0)
        if "[" in reply_to:
            self._answers.setsockopt(zmq.IPV6, 1)
        if self._key is not None:
            self._key.guard_connector(self._answers)
        self._answers.connect(reply_to)

    def _start(self, read: Read) -> None:
        if read.read_id in self._tasks:
            return
        peer = self._peers.setdefault(read.source_epoch, PeerState(read.source_epoch))
        task = self._tasks[read.read_id] = ReadTask(read, peer)
        peer.waiting.append(task)
        if peer.thread is None:
            peer.thread = threading.Thread(target=self._work, args=(peer,), name="kv read", daemon=True)
            peer.thread.start()

    def _stop(self, task: ReadTask) -> None:
        task.stop.set()
        if task in task.peer.waiting:
            task.peer.waiting.remove(task)
            self._end(task, ReadEnded(task.read.read_id, self._rank, "", 0, 0.0, STOPPED))

    def _drop(self, epoch: int) -> set[tuple[str, int, bytes]]:
        """Forget an engine. Returns (transport, group, description) of everything that transports must drop."""
        peer = self._peers.pop(epoch, None)
        if peer is None:
            return set()
        for task in list(self._tasks.values()):
            if task.peer is peer:
                self._stop(task)
        return set(peer.descriptions)

    def _end(self, task: ReadTask, ended: ReadEnded) -> None:
        del self._tasks[task.read.read_id]
        if self._answers is None:
            logger.error("no engine has attached to the KV worker, so %s cannot be reported", ended)
        else:
            self._answer(ended)

    def _answer(self, answer: KVWorkerAnswer) -> None:
        assert self._answers is not None
        self._answers.send(self._encode(answer))


def stages_of(ranks: list[dict[str, bytes]], group: int) -> list[tuple[list[dict[str, bytes]], range]]:
    """Return the descriptions of each stage's ranks, with the layers of a KV cache group that they hold. Raises
    TransportError."""
    stages: dict[int, list[dict[str, bytes]]] = {}
    layers: dict[int, range] = {}
    for rank in ranks:
        if HELD not in rank:
            raise TransportError("the source does not say which layers its ranks hold")
        held = msgspec.msgpack.decode(rank[HELD], type=HeldLayers)
        if group >= len(held.layers):
            raise TransportError(f"the source has no KV cache group {group}")
        stages.setdefault(held.stage, []).append(rank)
        layers[held.stage] = range(*held.layers[group])
    return [(of_stage, layers[stage]) for stage, of_stage in stages.items()]


def key_of(name: str, group: int) -> str:
    """Return the key of a transport's description for a KV cache group."""
    return name if group == 0 else f"{name}/{group}"


def open_transports(
    memory: BlockMemory, host: str, name: str, progress_s: float, key: ClusterKey | None = None
) -> dict[str, KVTransport]:
    """Return the available transports by name, preferred ones first. Raises StartupError."""
    found: dict[str, KVTransport] = {}
    if name in ("auto", "nixl"):
        from engine.kv_transfer.transport.nixl import NixlTransport

        try:
            found["nixl"] = NixlTransport(memory, progress_s, host)
        except TransportError as error:
            if name == "nixl":
                raise StartupError(f"handoff.transport is nixl, which is unavailable: {error}") from error
            logger.info("kv travels over tcp, because nixl is unavailable: %s", error)
    try:
        if name != "nixl":
            found["tcp"] = TcpTransport(memory, host, progress_s, key)
    except OSError as error:
        raise StartupError(f"KV transport {name} cannot listen at {host}: {error}") from error
    return found

"""TCP transport with a checksum on every frame. It has no special requirements, and works between any two hosts.

A connection carries one read at a time. The reader asks for blocks and heads; the source answers in frames of about
FRAME_BYTES, whose borders both sides compute in the same way. Whole blocks go from cache to cache without an
intermediate copy: sendmsg gathers them at the source, recvmsg_into scatters them at the reader.

When a connection opens, each side proves by a challenge (HMAC, RFC 2104) that it has a secret derived from the
cluster's key and the source process's key. So no stranger can read KV or pose as a source, and a new process at an old
address is not mistaken for the previous one. The data itself is neither encrypted nor signed. An attacker who sees the
packets can read it, and one who can change packets can change it.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import xxhash

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.refusals import REFUSALS
from engine.kv_transfer.transport.base import (
    POLL_INTERVAL_S,
    BlockReads,
    CacheLayout,
    Region,
    TransferProgress,
    TransportError,
)
from engine.kv_transfer.transport.memory import BlockMemory

logger = logging.getLogger(__name__)

FRAME_BYTES = 1 << 20
MAX_BUFFERS = 1024  # per sendmsg or recvmsg (IOV_MAX)
CHALLENGE = struct.Struct("<4s32s")  # first message of the source: MAGIC, nonce
RESPONSE = struct.Struct("<32s32s")  # first message of the reader: nonce, proof; the source answers with its own proof
REQUEST = struct.Struct("<4sIHHHHQ")  # MAGIC, number of blocks, its Region, checksum; then block ids
MAGIC = b"KV03"
FRAME = struct.Struct("<IIQ")  # number, bytes, checksum; then the bytes
REFUSED = 0xFFFFFFFF  # frame number of a refusal, whose bytes are the reason in UTF-8
MAX_REASON = 1000  # bytes
NAME = "kv_tcp"  # name of the socket in metrics
CLOSE_S = 1.0  # that `close` waits for a thread to end
RETRY_S = 1.0  # pause after accepting a connection has failed, say for lack of file descriptors


class TcpDescription(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    key: bytes
    """Random bytes, so that the next process at the same address has another key."""
    layout: CacheLayout


def decode(description: bytes) -> TcpDescription:
    return msgspec.msgpack.decode(description, type=TcpDescription)


class TcpTransport:
    """Transport over TCP. progress_s: seconds that either side waits for the other to take or send something."""

    name = "tcp"

    def __init__(self, memory: BlockMemory, host: str, progress_s: float, key: ClusterKey | None = None):
        """host: IP address of this machine; OSError is raised for any other. key: cluster key, which readers and
        sources share."""
        self._memory, self._progress_s, self._key = memory, progress_s, key
        own = secrets.token_bytes(16)
        self._source = TcpSource(memory, host, shared_secret(key, own), progress_s)
        self._description = msgspec.msgpack.encode(TcpDescription(host, self._source.port, own, memory.layout))
        self._lock = threading.Lock()
        self._idle: defaultdict[bytes, list[socket.socket]] = defaultdict(list)
        self._busy: defaultdict[bytes, set[socket.socket]] = defaultdict(set)

    def describe(self) -> bytes:
        return self._description

    def read(self, source: bytes, reads: BlockReads, stop: threading.Event) -> int:
        remote = decode(source)
        size = reads.check(remote.layout, self._memory.layout)
        progress = TransferProgress(stop, self._progress_s)
        try:
            connection = self._connection(source, remote, progress)
            try:
                seed = ask(connection, reads, remote.layout, progress)
                for number, blocks in enumerate(cut(reads.local, size)):
                    self._receive(connection, progress, number, seed ^ number, blocks, size, reads)
            except BaseException:
                self._give_up(source, connection)
                raise
        except OSError as error:
            raise TransportError(f"connection to {remote.host}:{remote.port} failed: {error}") from error
        self._give_back(source, connection)
        return size * len(reads.local)

    def drop(self, source: bytes) -> None:
        with self._lock:
            idle, busy = self._idle.pop(source, []), self._busy.pop(source, set())
        for connection in idle:
            connection.close()
        for connection in busy:  # the reader wakes, and closes it
            shut_down(connection)

    def close(self) -> None:
        for source in {*self._idle, *self._busy}:
            self.drop(source)
        self._source.close()

    def _receive(
        self,
        connection: socket.socket,
        progress: TransferProgress,
        number: int,
        seed: int,
        blocks: list[int],
        size: int,
        reads: BlockReads,
    ) -> None:
        """Receive one frame into the cache. If the frame is damaged, the read fails, but parts of the frame may have
        been written to the cache."""
        got, num_bytes, checksum = receive_header(connection, progress)
        if (got, num_bytes) != (number, size * len(blocks)):
            raise TransportError(
                f"checksum: frame {got} of {num_bytes} bytes arrived, "
                f"expected frame {number} of {size * len(blocks)} bytes"
            )
        region = reads.local_region(self._memory.layout)
        staging = None if self._memory.direct(region) else np.empty(num_bytes, np.uint8)
        buffers = self._memory.views(blocks) if staging is None else [staging.data]
        receive(connection, buffers, progress)
        if digest(buffers, seed) != checksum:
            raise TransportError(f"checksum: frame {number} was damaged on the way")
        if staging is not None:
            self._memory.scatter(blocks, region, staging)

    def _connection(self, source: bytes, remote: TcpDescription, progress: TransferProgress) -> socket.socket:
        while True:
            with self._lock:
                connection = self._idle[source].pop() if self._idle[source] else None
            if connection is None:
                connection = connect(remote.host, remote.port, progress)
                try:
                    greet(connection, shared_secret(self._key, remote.key), progress)
                except BaseException:
                    connection.close()
                    raise
            elif ready(connection, select.POLLIN, 0):  # no request is pending, so input means that the source closed it
                connection.close()
                continue
            with self._lock:
                self._busy[source].add(connection)
            return connection

    def _give_up(self, source: bytes, connection: socket.socket) -> None:
        """Close a connection whose read failed. Data that has not arrived yet is lost."""
        with self._lock:
            if source in self._busy:
                self._busy[source].discard(connection)
        connection.close()

    def _give_back(self, source: bytes, connection: socket.socket) -> None:
        with self._lock:
            kept = connection in self._busy.get(source, ())  # False if `drop` was called meanwhile
            if kept:
                self._busy[source].discard(connection)
                self._idle[source].append(connection)
        if not kept:
            connection.close()


class TcpSource:
    """Serves blocks of `memory` to readers that have the `secret`, with one thread to accept and one per connection."""

    def __init__(self, memory: BlockMemory, host: str, secret: bytes, progress_s: float):
        self._memory, self._secret, self._progress_s = memory, secret, progress_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="kv accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._closing.set()
        shut_down(self._listener)  # wakes the accepting thread, which `close` alone does not
        self._listener.close()
        self._accepting.join()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            shut_down(connection)
        for thread in serving.values():
            thread.join(CLOSE_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.warning("cannot take a KV connection: %s", error)
                    self._closing.wait(RETRY_S)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="kv source", daemon=True)
            with self._lock:
                self._serving[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            known = self._challenge(connection)
            while known and self._answer(connection):
                pass
        except (OSError, TransportError) as error:  # expected: a reader that stops a read closes its connection
            logger.debug("KV connection ended: %s", error)
        except Exception:
            logger.exception("KV connection failed")
        finally:
            with self._lock:
                self._serving.pop(connection)
            connection.close()

    def _challenge(self, connection: socket.socket) -> bool:
        """Prove to the reader that this source has the secret. Returns whether the reader has it."""
        connection.settimeout(POLL_INTERVAL_S)
        progress, nonce = TransferProgress(self._closing, self._progress_s), secrets.token_bytes(32)
        try:
            send(connection, [memoryview(CHALLENGE.pack(MAGIC, nonce))], progress)
            theirs, proof = RESPONSE.unpack(receive_bytes(connection, RESPONSE.size, progress))
            known = hmac.compare_digest(proof, prove(self._secret, b"reader", nonce, theirs))
        except (OSError, TransportError) as error:
            if not self._closing.is_set():
                REFUSALS.add(NAME, "unauthenticated", error)
            return False
        if known:
            proof = prove(self._secret, b"source", nonce, theirs)
            send(connection, [memoryview(FRAME.pack(0, len(proof), 0) + proof)], progress)
        else:
            REFUSALS.add(NAME, "unauthenticated", "a reader does not have the secret")
            refuse(
                connection,
                "the reader expects another process at this address, or belongs to another cluster",
                progress,
            )
        return known

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one read. Returns False if the connection has ended."""
        connection.settimeout(None)
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        connection.settimeout(POLL_INTERVAL_S)
        progress = TransferProgress(self._closing, self._progress_s)
        header = receive_bytes(connection, REQUEST.size, progress)
        magic, num_blocks, *numbers, seed = REQUEST.unpack(header)
        region = Region(*numbers)
        layout = self._memory.layout
        try:
            if magic != MAGIC:
                raise TransportError("the message is not a request")
            if num_blocks > layout.num_blocks:
                raise TransportError(f"the reader requests {num_blocks} blocks, but there are only {layout.num_blocks}")
            ids = receive_bytes(connection, 4 * num_blocks, progress)
            if digest([header[:-8], ids], 0) != seed:
                raise TransportError("checksum: the request was damaged on the way")
            blocks: list[int] = np.frombuffer(ids, np.uint32).tolist()
            layout.check(blocks, region)
        except TransportError as error:
            REFUSALS.add(NAME, "malformed", error)
            refuse(connection, str(error), progress)
            return False
        self._deliver(connection, progress, blocks, region, seed)
        return True

    def _deliver(
        self, connection: socket.socket, progress: TransferProgress, blocks: list[int], region: Region, seed: int
    ) -> None:
        size = self._memory.layout.piece_bytes(region)
        for number, some in enumerate(cut(blocks, size)):
            if self._memory.direct(region):
                buffers = self._memory.views(some)
            else:
                buffers = [self._memory.gather(some, region).data]
            header = FRAME.pack(number, size * len(some), digest(buffers, seed ^ number))
            send(connection, [memoryview(header), *buffers], progress)


def shared_secret(cluster: ClusterKey | None, source: bytes) -> bytes:
    """Return the secret that a reader and a source share. source: the key in the source's description."""
    return source if cluster is None else cluster.derive(source)


def prove(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    """Return a 32-byte proof that only a holder of the secret can make. side: the sender's side, so that no side can
    echo the other's proof."""
    return hmac.digest(secret, b"".join([side, *nonces]), "sha256")


def greet(connection: socket.socket, secret: bytes, progress: TransferProgress) -> None:
    """Open a connection, as the reader. Raises TransportError if either side does not have the secret."""
    magic, nonce = CHALLENGE.unpack(receive_bytes(connection, CHALLENGE.size, progress))
    if magic != MAGIC:
        raise TransportError("the process at this address is not a KV source of this version")
    own = secrets.token_bytes(32)
    send(connection, [memoryview(RESPONSE.pack(own, prove(secret, b"reader", nonce, own)))], progress)
    expected = prove(secret, b"source", nonce, own)
    _, num_bytes, _ = receive_header(connection, progress)
    if num_bytes != len(expected) or not hmac.compare_digest(receive_bytes(connection, num_bytes, progress), expected):
        raise TransportError("a different process listens at this address, or a process of another cluster")


def refuse(connection: socket.socket, reason: str, progress: TransferProgress) -> None:
    data = reason.encode()[:MAX_REASON]
    send(connection, [memoryview(FRAME.pack(REFUSED, len(data), 0) + data)], progress)


def ask(connection: socket.socket, reads: BlockReads, layout: CacheLayout, progress: TransferProgress) -> int:
    """Send a read request to a source with this layout. Returns the seed of the answer's checksums; any other answer
    has wrong checksums."""
    ids = np.array(reads.remote, np.uint32).tobytes()
    header = REQUEST.pack(MAGIC, len(reads.remote), *reads.remote_region(layout), 0)[:-8]
    seed = digest([header, ids], 0)
    send(connection, [memoryview(header + seed.to_bytes(8, "little") + ids)], progress)
    return seed


def receive_header(connection: socket.socket, progress: TransferProgress) -> tuple[int, int, int]:
    """Return number, bytes and checksum of the next frame. Raises TransportError if the source refuses."""
    number, num_bytes, checksum = FRAME.unpack(receive_bytes(connection, FRAME.size, progress))
    if number == REFUSED and num_bytes <= MAX_REASON:
        reason = receive_bytes(connection, num_bytes, progress).decode(errors="replace")
        raise TransportError(f"refused by the source: {reason}")
    return number, num_bytes, checksum


def cut(blocks: list[int], size: int) -> Iterator[list[int]]:
    """Yield the blocks of each frame. size: bytes of one block."""
    step = max(1, FRAME_BYTES // size)
    for first in range(0, len(blocks), step):
        yield blocks[first : first + step]


def digest(buffers: Sequence[memoryview | bytes], seed: int) -> int:
    """Return the XXH3 checksum of the buffers. It detects link errors as well as a CRC, several times faster (20 GB/s
    in cache)."""
    total = xxhash.xxh3_64(seed=seed)
    for buffer in buffers:
        total.update(buffer)
    return total.intdigest()


def connect(host: str, port: int, progress: TransferProgress) -> socket.socket:
    """Return a new connection. Raises OSError, or TransportError when `progress` ends the wait."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        prepare(connection)
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.connect((host, port))
        while not ready(connection, select.POLLOUT, POLL_INTERVAL_S):
            progress.check()
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connection.settimeout(POLL_INTERVAL_S)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def receive(connection: socket.socket, buffers: list[memoryview], progress: TransferProgress) -> None:
    """Fill the buffers. Raises OSError, or TransportError when `progress` ends the wait."""
    while buffers:
        progress.check()
        with suppress(TimeoutError):
            num_bytes = connection.recvmsg_into(buffers[:MAX_BUFFERS])[0]
            if not num_bytes:
                raise ConnectionError("closed by the other side")
            progress.made()
            buffers = rest(buffers, num_bytes)


def receive_bytes(connection: socket.socket, num_bytes: int, progress: TransferProgress) -> bytes:
    buffer = bytearray(num_bytes)
    receive(connection, [memoryview(buffer)], progress)
    return bytes(buffer)


def send(connection: socket.socket, buffers: list[memoryview], progress: TransferProgress) -> None:
    """Send the buffers. Raises OSError, or TransportError when `progress` ends the wait."""
    while buffers:
        progress.check()
        with suppress(TimeoutError):
            num_bytes = connection.sendmsg(buffers[:MAX_BUFFERS])
            progress.made()
            buffers = rest(buffers, num_bytes)


def rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return the parts of the buffers after the first `done` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def ready(connection: socket.socket, events: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(timeout_s * 1000))


def shut_down(connection: socket.socket) -> None:
    """Shut a connection down, which wakes the threads that wait for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

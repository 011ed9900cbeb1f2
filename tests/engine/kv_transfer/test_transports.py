"""Every transport, between transports of one process; and faults of links and processes."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.distributed.cluster_key import ClusterKey
from engine.kv_transfer.transport import nixl, tcp
from engine.kv_transfer.transport.base import BlockReads, KVTransport, Region, TransferProgress, TransportError
from engine.kv_transfer.transport.head_map import HeadPart, HeadShard, LayerPart, overlap, parts
from engine.kv_transfer.transport.memory import BlockMemory
from engine.kv_transfer.transport.nixl import NixlTransport
from engine.kv_transfer.transport.tcp import TcpTransport
from tests.engine.kv_transfer.caches import SourceProcess, full_cache, shard_cache
from tests.engine.kv_transfer.link import Link, address_of, with_address
from tests.products import each_once, slow
from tests.refused import Refused
from tests.serve.serve_run import wait_until

HOST = "127.0.0.1"
NEVER = threading.Event()
ALL = HeadPart(0, 0, 0, 2)  # of a cache of two heads
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed")

Make = Callable[..., KVTransport]


class StopAfter(threading.Event):
    """Is set once it was looked at so many times."""

    def __init__(self, looks: int):
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        if self.looks < 0:
            self.set()
        return super().is_set()


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=needs_nixl)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(name: str) -> Iterator[Make]:
    yield from maker(name)


@pytest.mark.parametrize(
    ("device", "limit", "warned"), [(True, 8 << 20, True), (True, -1, False), (False, 8 << 20, False)]
)
def test_rdma_that_may_not_pin_memory_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    device: bool,
    limit: int,
    warned: bool,
) -> None:
    if device:
        (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(nixl.resource, "getrlimit", lambda _: (limit, limit))
    nixl.warn_if_memory_cannot_be_pinned()
    assert ("RLIMIT_MEMLOCK unlimited, got 8192 KiB" in caplog.text) is warned


@pytest.fixture
def make_tcp() -> Iterator[Make]:
    yield from maker("tcp")


@pytest.fixture
def make_nixl() -> Iterator[Make]:
    yield from maker("nixl")


def maker(name: str) -> Iterator[Make]:
    made: list[KVTransport] = []

    def make(cache: Tensor, progress_s: float = 20.0) -> KVTransport:
        if name == "nixl":
            made.append(watched_nixl(cache, progress_s))
        else:
            made.append(TcpTransport(BlockMemory(cache), HOST, progress_s))
        return made[-1]

    yield make
    for transport in made:
        transport.close()
        memory = transport._memory  # type: ignore[attr-defined]
        assert not isinstance(memory, WatchedMemory) or not memory.strays


class WatchedMemory(BlockMemory):
    """Host memory that stands for a GPU's: it knows which threads have entered."""

    def __init__(self, cache: Tensor, needs_context: bool = False):
        super().__init__(cache)
        self.needs_context, self.threads = needs_context, threading.local()
        self.strays: set[str] = set()  # what was called in a thread that had not

    def enter_thread(self) -> None:
        self.threads.entered = True


class Watched:
    """A NIXL agent, or a handle of its, that is called in entered threads alone."""

    def __init__(self, inner: object, memory: WatchedMemory):
        self.inner, self.memory = inner, memory

    def __getattr__(self, name: str) -> object:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: object) -> object:
            if not hasattr(self.memory.threads, "entered"):
                self.memory.strays.add(name)
            given = [arg.inner if isinstance(arg, Watched) else arg for arg in args]
            returned = found(*given)
            return Watched(returned, self.memory) if name == "initialize_xfer" else returned

        return call


def watched_nixl(cache: Tensor, progress_s: float, needs_context: bool = False) -> NixlTransport:
    memory, start = WatchedMemory(cache, needs_context), nixl.start_agent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl, "start_agent", lambda host, **options: Watched(start(host, **options), memory))
        return NixlTransport(memory, progress_s, "127.0.0.1")


@needs_nixl
def test_ranks_that_others_reach_only_on_loopback_listen_nowhere_else() -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("inet")
        return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}

    before = listening()
    transport = NixlTransport(BlockMemory(full_cache(4, 2)), 20.0, "127.0.0.1")
    opened = listening() - before
    transport.close()
    assert opened and {ip_address(address).is_loopback for address, _ in opened} == {True}
    assert nixl.DEVICES not in os.environ


@needs_nixl
def test_a_thread_that_reads_without_a_context_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = watched_nixl(full_cache(4, 2), 20.0), watched_nixl(full_cache(4, 2, seed=1), 20.0)
    monkeypatch.setattr(WatchedMemory, "enter_thread", lambda memory: None)  # planted
    with ThreadPoolExecutor(1) as pool:
        pool.submit(reader.read, source.describe(), BlockReads([0], [0], ALL), NEVER).result()
    memory = reader._memory
    for transport in (reader, source):
        transport.close()
    assert isinstance(memory, WatchedMemory) and memory.strays


@needs_nixl
def test_a_thread_of_ours_makes_nixls_progress_where_that_takes_a_context() -> None:
    there, here = full_cache(40, 2), full_cache(40, 2, seed=1)
    source, reader = watched_nixl(there, 20.0, needs_context=True), watched_nixl(here, 20.0, needs_context=True)
    reads = BlockReads(list(range(40)), list(range(40)), ALL)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(reader.read, source.describe(), reads, NEVER).result()
    assert torch.equal(here, there)
    for transport in (reader, source):
        assert transport._progress_thread.is_alive()
        transport.close()
        assert not transport._progress_thread.is_alive()
        assert isinstance(transport._memory, WatchedMemory) and not transport._memory.strays


@pytest.mark.parametrize(
    ("order", "dtype"), each_once(["run", "scattered", "to a run", "from a run"], [torch.float32, torch.bfloat16])
)
def test_blocks_arrive_bit_for_bit_and_no_others_change(make: Make, dtype: torch.dtype, order: str) -> None:
    there, here = full_cache(40, 2, dtype), full_cache(50, 2, dtype, seed=1)
    before = here.clone()
    run, mixed = list(range(7, 27)), random.Random(0).sample(range(40), 20)
    remote = run if order in ("run", "from a run") else mixed
    local = run if order in ("run", "to a run") else mixed[::-1]
    num_bytes = make(here).read(make(there).describe(), BlockReads(remote, local, ALL), NEVER)
    assert num_bytes == there[remote].nbytes
    before[local] = there[remote]
    assert torch.equal(here, before)


@pytest.mark.parametrize(
    ("kv_heads", "source", "reader", "dtype"),
    [
        (2, 1, 2, torch.float32),
        (2, 2, 1, torch.bfloat16),
        (4, 2, 4, torch.bfloat16),
        (4, 4, 1, torch.float32),
        (1, 4, 2, torch.float32),
    ],
)
def test_ranks_read_their_heads_from_an_engine_of_another_size(
    make: Make, kv_heads: int, source: int, reader: int, dtype: torch.dtype
) -> None:
    full = full_cache(12, kv_heads, dtype)
    sources = [make(shard_cache(full, HeadShard(kv_heads, rank, source))) for rank in range(source)]
    remote, local = [3, 4, 5, 9, 1], [0, 1, 2, 3, 11]
    for rank in range(reader):
        shard = HeadShard(kv_heads, rank, reader)
        here = torch.zeros_like(shard_cache(full, shard))
        transport = make(here)
        for part in parts(shard, source):
            transport.read(sources[part.source_rank].describe(), BlockReads(remote, local, part), NEVER)
        expected = torch.zeros_like(here)
        expected[local] = shard_cache(full, shard)[remote]
        assert torch.equal(here, expected)


@pytest.mark.parametrize("heads", [(0, 0, 2), (1, 0, 1)])
def test_a_rank_reads_the_layers_that_another_stage_holds_too(make: Make, heads: tuple[int, int, int]) -> None:
    there = torch.cat([full_cache(12, 2), full_cache(12, 2, seed=1)], dim=1)  # layers 1 to 4
    here = torch.zeros_like(there[:, :3])  # layers 3 to 5
    remote, local = [3, 4, 5, 9, 1], [0, 1, 2, 3, 11]
    layers = overlap(range(3, 6), range(1, 5))
    assert layers == LayerPart(2, 0, 2)
    remote_head, local_head, count = heads
    reads = BlockReads(remote, local, HeadPart(0, remote_head, local_head, count), layers)
    assert make(here).read(make(there).describe(), reads, NEVER) == there[:5, :2, :, :count].nbytes
    expected = torch.zeros_like(here)
    expected[local, :2, :, local_head : local_head + count] = there[remote, 2:, :, remote_head : remote_head + count]
    assert torch.equal(here, expected)


def test_a_read_of_many_frames_ends_with_a_smaller_one(make: Make) -> None:
    blocks = 5 * tcp.FRAME_BYTES // full_cache(1, 2).nbytes // 2 + 3
    there = full_cache(blocks, 2)
    here = torch.zeros_like(there)
    ids = list(range(blocks))
    make(here).read(make(there).describe(), BlockReads(ids, ids, ALL), NEVER)
    assert torch.equal(here, there)


@pytest.mark.parametrize("part", [HeadPart(0, 0, 0, 2), HeadPart(0, 1, 0, 1)])
def test_a_block_may_be_larger_than_a_frame(make: Make, part: HeadPart) -> None:
    there = torch.randn(3, 3, 2, 2, 64, 1024)
    assert there[0].nbytes // 2 > max(tcp.FRAME_BYTES, nixl.PIECE_BYTES)
    here = torch.zeros_like(there)
    make(here).read(make(there).describe(), BlockReads([2, 1], [0, 1], part), NEVER)
    heads = slice(part.remote_start, part.remote_start + part.count)
    assert torch.equal(here[:2, :, :, : part.count], there[[2, 1], :, :, heads])
    assert not here[2].any()


def test_a_read_of_no_blocks_reads_nothing(make: Make) -> None:
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    assert make(here).read(make(there).describe(), BlockReads([], [], ALL), NEVER) == 0


def test_two_sources_are_read_at_the_same_time(make: Make) -> None:
    ids = list(range(200))
    there = [full_cache(200, 2, seed=seed) for seed in range(2)]
    here = torch.zeros_like(torch.cat(there))
    reader, sources = make(here), [make(cache) for cache in there]

    def read(i: int) -> int:
        local = list(range(200 * i, 200 * i + 200))
        return sum(reader.read(sources[i].describe(), BlockReads(ids, local, ALL), NEVER) for _ in range(5))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == [5 * there[0].nbytes] * 2
    assert torch.equal(here, torch.cat(there))


@pytest.mark.parametrize(
    ("remote", "local", "part", "message"),
    [
        ([4], [0], ALL, "blocks must be below 4, got 4 to 4"),
        ([0, 1], [0, 9], ALL, "blocks must be below 5, got 0 to 9"),
        ([-1], [0], ALL, "blocks must be below 4, got -1"),
        ([0], [0], HeadPart(0, 1, 0, 2), r"heads must be within \[0, 2\), got \[1, 3\)"),
        ([0], [0], HeadPart(0, 0, 1, 2), r"heads must be within \[0, 2\), got \[1, 3\)"),
    ],
)
def test_what_is_outside_of_a_cache_is_not_read(
    make: Make, remote: list[int], local: list[int], part: HeadPart, message: str
) -> None:
    there, here = full_cache(4, 2), full_cache(5, 2, seed=1)
    before = here.clone()
    with pytest.raises(TransportError, match=message):
        make(here).read(make(there).describe(), BlockReads(remote, local, part), NEVER)
    assert torch.equal(here, before)


def test_a_cache_of_another_layout_is_not_read(make: Make) -> None:
    there, here = full_cache(4, 2, torch.bfloat16), full_cache(4, 2, torch.float32)
    with pytest.raises(TransportError, match="another layout"):
        make(here).read(make(there).describe(), BlockReads([0], [0], ALL), NEVER)


def test_a_read_that_is_stopped_before_it_starts_writes_nothing(make: Make) -> None:
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    before = here.clone()
    stop = threading.Event()
    stop.set()
    with pytest.raises(TransportError, match="stopped"):
        make(here).read(make(there).describe(), BlockReads([0], [0], ALL), stop)
    assert torch.equal(here, before)


@pytest.mark.parametrize("looks", [1, 4, 11, *slow([2, 8])])
def test_a_read_that_is_stopped_on_its_way_writes_nothing_more_and_spoils_no_other(make: Make, looks: int) -> None:
    blocks = 12 * tcp.FRAME_BYTES // full_cache(1, 2).nbytes
    there = full_cache(blocks, 2)
    here = torch.zeros_like(there)
    reader, source = make(here), make(there).describe()
    first, last = list(range(blocks - 5)), list(range(blocks - 5, blocks))
    with pytest.raises(TransportError, match="stopped"):
        reader.read(source, BlockReads(first, first, ALL), StopAfter(looks))
    after = here.clone()
    for _ in range(3):
        reader.read(source, BlockReads(last, last, ALL), NEVER)
    assert torch.equal(here[last], there[last])
    assert torch.equal(here[first], after[first])


def test_a_source_that_is_dropped_with_a_read_on_its_way_harms_no_other(make: Make) -> None:
    blocks = 6 * tcp.FRAME_BYTES // full_cache(1, 2).nbytes
    first, second = full_cache(blocks, 2), full_cache(blocks, 2, seed=1)
    here = torch.zeros_like(first)
    reader, old, new = make(here), make(first).describe(), make(second).describe()
    ids = list(range(blocks))
    for looks in (2, 4, 5):
        with pytest.raises(TransportError, match="stopped"):
            reader.read(old, BlockReads(ids, ids, ALL), StopAfter(looks))
        reader.drop(old)
        reader.read(new, BlockReads(ids, ids, ALL), NEVER)
        assert torch.equal(here, second)


def test_a_dropped_source_is_reached_anew(make: Make) -> None:
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    reader, source = make(here), make(there).describe()
    reader.read(source, BlockReads([0], [0], ALL), NEVER)
    reader.drop(source)
    reader.drop(source)
    reader.read(source, BlockReads([1], [1], ALL), NEVER)
    assert torch.equal(here[:2], there[:2])


def test_a_source_that_has_closed_is_an_error_and_another_one_is_read(make: Make) -> None:
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    reader, source = make(here, progress_s=2.0), make(there)
    reader.read(source.describe(), BlockReads([0], [0], ALL), NEVER)
    old = source.describe()
    source.close()

    def is_an_error() -> bool:
        """UCX may take a moment to notice, in which the memory is still read."""
        try:
            reader.read(old, BlockReads([1], [1], ALL), NEVER)
        except TransportError:
            return True
        return False

    wait_until(is_an_error)
    reader.drop(old)
    new = make(there).describe()
    assert new != old
    reader.read(new, BlockReads([2], [2], ALL), NEVER)
    assert torch.equal(here[2], there[2])


@settings(max_examples=60)
@given(data=st.data())
def test_any_blocks_and_heads_travel_over_tcp(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, heads))
    remote_start, local_start = (data.draw(st.integers(0, heads - count)) for _ in range(2))
    remote = data.draw(st.lists(st.integers(0, 29), unique=True))
    local = data.draw(st.permutations(range(30)))[: len(remote)]
    there, here = full_cache(30, heads), full_cache(30, heads, seed=1)
    expected = here.clone()
    a, b = slice(remote_start, remote_start + count), slice(local_start, local_start + count)
    for i, j in zip(remote, local, strict=True):
        expected[j, :, :, b] = there[i, :, :, a]
    reader, source = (TcpTransport(BlockMemory(cache), HOST, 20.0) for cache in (here, there))
    reader.read(source.describe(), BlockReads(remote, local, HeadPart(0, remote_start, local_start, count)), NEVER)
    reader.close()
    source.close()
    assert torch.equal(here, expected)


# -- faults of a link, where the transport has to notice itself ------------------------------------------------


@pytest.fixture
def link(make_tcp: Make) -> Iterator[SpoiltRead]:
    spoilt = SpoiltRead(make_tcp)
    yield spoilt
    spoilt.link.close()


class SpoiltRead:
    """A reader, a source of some MB, and a link between them."""

    def __init__(self, make: Make, progress_s: float = 20.0):
        """progress_s: long, since a busy machine may take a second for the first bytes of a read."""
        self.there = full_cache(3 * tcp.FRAME_BYTES // full_cache(1, 2).nbytes, 2)
        self.here = torch.zeros_like(self.there)
        self.reader = make(self.here, progress_s)
        source = make(self.there).describe()
        self.link = Link.to(source)
        self.source = self.link.describe(source)
        ids = list(range(len(self.there)))
        self.reads = BlockReads(ids, ids, ALL)

    def read(self, stop: threading.Event = NEVER) -> int:
        return self.reader.read(self.source, self.reads, stop)

    def assert_reads(self) -> None:
        self.here.zero_()
        assert self.read() == self.there.nbytes
        assert torch.equal(self.here, self.there)


def test_a_link_without_faults_changes_nothing(link: SpoiltRead) -> None:
    link.assert_reads()


GREETING = tcp.CHALLENGE.size + tcp.FRAME.size + 32  # bytes that a source sends before the first read


@pytest.mark.parametrize("at", [0, 5, 9, tcp.FRAME.size, 100_000, tcp.FRAME.size + tcp.FRAME_BYTES + 2, 2_500_000])
def test_a_flipped_bit_anywhere_fails_the_read(link: SpoiltRead, at: int) -> None:
    link.link.corrupt(after=GREETING + at)
    with pytest.raises(TransportError, match="checksum"):
        link.read()
    link.assert_reads()


@pytest.mark.parametrize("at", [0, tcp.CHALLENGE.size - 1, tcp.CHALLENGE.size + 4, GREETING - 1])
def test_a_flipped_bit_in_the_greeting_fails_the_read(link: SpoiltRead, at: int) -> None:
    link.link.corrupt(after=at)
    with pytest.raises(TransportError):
        link.read()
    link.assert_reads()


def test_a_flipped_bit_in_a_request_is_refused(make_tcp: Make) -> None:
    remote = tcp.decode(make_tcp(full_cache(4, 2)).describe())
    progress = TransferProgress(NEVER, 5.0)
    connection = tcp.connect(remote.host, remote.port, progress)
    tcp.greet(connection, remote.key, progress)
    header = tcp.REQUEST.pack(tcp.MAGIC, 1, 0, 2, 0, 2, 0)[:-8]
    meant, came = (1).to_bytes(4, "little"), (3).to_bytes(4, "little")
    checksum = tcp.digest([header, meant], 0).to_bytes(8, "little")
    tcp.send(connection, [memoryview(header + checksum + came)], progress)
    with pytest.raises(TransportError, match="refused by the source: checksum"):
        tcp.receive_header(connection, progress)
    connection.close()


@pytest.mark.parametrize("after", [0, 10, 1_500_000])
def test_a_cut_link_fails_the_read_and_a_healed_one_is_used_again(link: SpoiltRead, after: int) -> None:
    link.link.hold(after)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(link.read)
        link.link.wait_held()
        link.link.cut()
        with pytest.raises(TransportError, match="connection to"):
            read.result()
    with pytest.raises(TransportError, match="connection to"):
        link.read()
    link.link.release()
    link.link.heal()
    link.assert_reads()


@pytest.mark.parametrize("after", [0, 10, 1_500_000])
def test_a_link_on_which_nothing_comes_fails_the_read_and_nothing_is_written_later(make_tcp: Make, after: int) -> None:
    link = SpoiltRead(make_tcp, progress_s=0.5)
    link.link.hold(after)
    with pytest.raises(TransportError, match=r"no progress for 0.5 s"):
        link.read()
    before = link.here.clone()
    link.link.release()
    link.reader.read(link.source, BlockReads([0], [0], ALL), NEVER)  # after what was held
    assert torch.equal(link.here[1:], before[1:])
    link.assert_reads()
    link.link.close()


def test_a_read_that_is_stopped_while_it_waits_ends_and_nothing_is_written_later(make_tcp: Make) -> None:
    spoilt = SpoiltRead(make_tcp)
    stop = threading.Event()
    spoilt.link.hold(after=1_500_000)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(spoilt.read, stop)
        spoilt.link.wait_held()
        stop.set()
        with pytest.raises(TransportError, match="stopped"):
            read.result(60)
    before = spoilt.here.clone()
    spoilt.link.release()
    spoilt.reader.read(spoilt.source, BlockReads([0], [0], ALL), NEVER)
    assert torch.equal(spoilt.here[1:], before[1:])
    assert not before[-1].any()
    spoilt.assert_reads()
    spoilt.link.close()


def test_a_dropped_source_ends_the_read_that_waits_for_it(make_tcp: Make) -> None:
    spoilt = SpoiltRead(make_tcp)
    spoilt.link.hold(after=1_500_000)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(spoilt.read)
        spoilt.link.wait_held()
        spoilt.reader.drop(spoilt.source)
        with pytest.raises(TransportError, match="connection to"):
            read.result(60)
    spoilt.link.release()
    spoilt.assert_reads()
    spoilt.link.close()


def test_a_slow_link_is_not_a_dead_one(make_tcp: Make) -> None:
    spoilt = SpoiltRead(make_tcp, progress_s=0.3)
    spoilt.link.throttle(3_000_000)  # so the read takes three times progress_s
    spoilt.assert_reads()
    spoilt.link.close()


def test_another_process_at_the_address_is_not_taken_for_the_one_before(make_tcp: Make) -> None:
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    old, new = make_tcp(there).describe(), make_tcp(there).describe()
    with pytest.raises(TransportError, match="the reader expects another process at this address"):
        make_tcp(here).read(with_address(old, *address_of(new)), BlockReads([0], [0], ALL), NEVER)


@pytest.mark.parametrize("stranger", [None, ClusterKey.generate()], ids=["no key", "another key"])
def test_a_reader_without_the_clusters_key_is_refused_and_counted(stranger: ClusterKey | None) -> None:
    """Though it knows all of the description, which travels between engines."""
    there, here, key = full_cache(4, 2), full_cache(4, 2, seed=1), ClusterKey.generate()
    before, refused = here.clone(), Refused(tcp.NAME, "unauthenticated")
    source, member = (TcpTransport(BlockMemory(cache), HOST, 20.0, key) for cache in (there, here))
    forger = TcpTransport(BlockMemory(here), HOST, 20.0, stranger)
    try:
        with pytest.raises(TransportError, match="refused by the source"):
            forger.read(source.describe(), BlockReads([0], [0], ALL), NEVER)
        assert refused.count == 1
        assert torch.equal(here, before)
        member.read(source.describe(), BlockReads([0], [0], ALL), NEVER)
        assert torch.equal(here[0], there[0])
    finally:
        for transport in (source, member, forger):
            transport.close()


def test_a_source_without_the_clusters_key_is_not_read() -> None:
    """It takes the place of a true one, whose description it knows, and answers as if all were well."""
    there, here, key = full_cache(4, 2), full_cache(4, 2, seed=1), ClusterKey.generate()
    before = here.clone()
    reader = TcpTransport(BlockMemory(here), HOST, 20.0, key)
    description = TcpTransport(BlockMemory(there), HOST, 20.0, key).describe()
    with socket.create_server((HOST, 0)) as listener:

        def forge() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(tcp.CHALLENGE.pack(tcp.MAGIC, bytes(32)) + tcp.FRAME.pack(0, 32, 0) + bytes(32))
                connection.sendall(bytes(10_000))
                connection.recv(1000)

        thread = threading.Thread(target=forge)
        thread.start()
        with pytest.raises(TransportError, match="a different process listens at this address"):
            reader.read(with_address(description, *listener.getsockname()), BlockReads([0], [0], ALL), NEVER)
        thread.join()
    assert torch.equal(here, before)
    reader.close()


@settings(max_examples=60)
@given(junk=st.binary(max_size=120), knows=st.booleans())
def test_no_bytes_end_a_source(junk: bytes, knows: bool) -> None:
    """Neither in the place of a greeting, nor after it."""
    there, here = full_cache(4, 2), full_cache(4, 2, seed=1)
    source, reader = (TcpTransport(BlockMemory(cache), HOST, 20.0) for cache in (there, here))
    remote, progress = tcp.decode(source.describe()), TransferProgress(NEVER, 5.0)
    connection = tcp.connect(remote.host, remote.port, progress)
    if knows:
        tcp.greet(connection, remote.key, progress)
    with suppress(TransportError, OSError):  # the source may have ended the connection at any point
        tcp.send(connection, [memoryview(junk)], progress)
        connection.shutdown(socket.SHUT_WR)
        while True:
            tcp.receive_bytes(connection, 1, progress)
    connection.close()
    reader.read(source.describe(), BlockReads([2], [1], ALL), NEVER)
    assert torch.equal(here[1], there[2])
    for transport in (source, reader):
        transport.close()


def test_a_source_checks_what_it_is_asked_for(make_tcp: Make) -> None:
    there, here = full_cache(4, 2), full_cache(9, 2, seed=1)
    forged = tcp.decode(make_tcp(there).describe())
    forged = msgspec.structs.replace(forged, layout=msgspec.structs.replace(forged.layout, num_blocks=9))
    with pytest.raises(TransportError, match="refused by the source: blocks must be below 4"):
        make_tcp(here).read(msgspec.msgpack.encode(forged), BlockReads([8], [0], ALL), NEVER)


# -- faults of a process -----------------------------------------------------------------------------------


def test_a_source_that_is_killed_in_mid_read_fails_it(make_tcp: Make) -> None:
    blocks = 32 * tcp.FRAME_BYTES // full_cache(1, 2).nbytes  # more than the kernels of a link hold
    source = SourceProcess("tcp", blocks)
    here = torch.zeros_like(full_cache(blocks, 2))
    ids = list(range(blocks))
    link = Link.to(source.description["tcp"])
    reader = make_tcp(here)
    link.hold(after=1_500_000)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(reader.read, link.describe(source.description["tcp"]), BlockReads(ids, ids, ALL), NEVER)
        link.wait_held()
        source.kill()
        link.release()
        with pytest.raises(TransportError, match="failed"):
            read.result()
    link.close()


def test_a_paused_source_fails_the_read_and_serves_when_it_goes_on(make_tcp: Make) -> None:
    source = SourceProcess("tcp", 8)
    there, here = full_cache(8, 2), full_cache(8, 2, seed=1)
    description = source.description["tcp"]
    reader = make_tcp(here, progress_s=0.3)
    source.process.send_signal(signal.SIGSTOP)
    before = here.clone()
    with pytest.raises(TransportError, match="no progress"):
        reader.read(description, BlockReads([1], [2], ALL), NEVER)
    source.process.send_signal(signal.SIGCONT)
    reader.read(description, BlockReads([3], [4], ALL), NEVER)
    before[4] = there[3]
    assert torch.equal(here, before)
    source.kill()


@needs_nixl
def test_reads_share_buffers_and_each_goes_on_with_one(make_nixl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PIECE_BYTES", 1)
    monkeypatch.setattr(nixl, "MAX_BUFFERS", 2)
    ids = list(range(20))
    there = [full_cache(20, 2, seed=seed) for seed in range(3)]
    here = torch.zeros_like(torch.cat(there))
    reader, sources = make_nixl(here), [make_nixl(cache) for cache in there]
    assert isinstance(reader, NixlTransport)

    def read(i: int) -> None:
        local = list(range(20 * i, 20 * i + 20))
        reader.read(sources[i].describe(), BlockReads(ids, local, ALL), NEVER)

    read(0)
    assert len(reader._free) == 2
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
    assert torch.equal(here, torch.cat(there))
    assert len(reader._free) <= 2 + 2 and reader._buffers_in_use == 0


def test_a_transfer_that_cannot_be_prepared_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("NIXL_ERR_NOT_FOUND")

    agent = SimpleNamespace(
        register_memory=lambda *_: None, deregister_memory=lambda _: None, get_agent_metadata=bytes,
        add_remote_agent=lambda _: b"peer", get_xfer_descs=lambda *_: None, initialize_xfer=refuse,
    )  # fmt: skip
    monkeypatch.setattr(nixl, "start_agent", lambda *_, **__: agent)
    reader = NixlTransport(BlockMemory(full_cache(4, 2)), 20.0, "127.0.0.1")
    for _ in range(nixl.MAX_BUFFERS + 1):
        with pytest.raises(TransportError, match="NIXL_ERR_NOT_FOUND"):
            reader.read(reader.describe(), BlockReads([0], [1], ALL), NEVER)
    assert reader._buffers_in_use == 0 and len(reader._free) == 1
    reader.close()


@pytest.mark.parametrize(("head_dim", "word_bytes"), [(4, 16), (2, 8), (3, 1)])
def test_a_gpu_moves_words_and_not_bytes(head_dim: int, word_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    source, target = torch.randn(9, 2, 2, 4, 1, head_dim), torch.zeros(9, 2, 2, 4, 1, head_dim)
    memories = [BlockMemory(cache) for cache in (source, target)]
    for memory in memories:
        memory._stream, memory._words = SimpleNamespace(synchronize=int), memory._in_words(memory.tensor)
    slabs = memories[0].layout.slabs
    data = memories[0].gather([7, 2, 3], Region(1, 2, 0, slabs))
    memories[1].scatter([0, 8, 4], Region(2, 2, 0, slabs), data)
    assert data.dtype == np.uint8 and memories[1]._words.itemsize == word_bytes
    assert torch.equal(target[[0, 8, 4]][:, :, :, 2:], source[[7, 2, 3]][:, :, :, 1:3])
    assert not target[[1, 2, 3, 5, 6, 7]].any() and not target[:, :, :, :2].any()


@pytest.mark.slow
@needs_nixl
def test_what_a_paused_nixl_source_sends_late_does_not_reach_the_cache(make_nixl: Make) -> None:
    source = SourceProcess("nixl", 8)
    here = torch.zeros_like(full_cache(8, 2))
    description = source.description["nixl"]
    reader = make_nixl(here, progress_s=2.0)
    source.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransportError, match="no progress"):
        reader.read(description, BlockReads([1], [2], ALL), NEVER)
    source.process.send_signal(signal.SIGCONT)
    for block in (3, 4):  # on the same connection, so after what came late
        reader.read(description, BlockReads([block], [block], ALL), NEVER)
    assert torch.equal(here[3:5], full_cache(8, 2)[3:5])
    assert not here[2].any()
    source.kill()


@needs_nixl
@pytest.mark.slow
def test_killed_nixl_sources_leave_the_reader_whole(make_nixl: Make) -> None:
    first, second = SourceProcess("nixl", 8), SourceProcess("nixl", 8, seed=1)
    here = torch.zeros_like(full_cache(8, 2))
    reader = make_nixl(here, progress_s=2.0)
    old = first.description["nixl"]
    reader.read(old, BlockReads([1], [1], ALL), NEVER)
    assert torch.equal(here[1], full_cache(8, 2)[1])
    first.kill()
    for _ in range(2):
        with pytest.raises(TransportError):
            reader.read(old, BlockReads([2], [2], ALL), NEVER)
    reader.drop(old)
    assert not here[2].any()
    reader.read(second.description["nixl"], BlockReads([3, 5], [3, 4], ALL), NEVER)
    assert torch.equal(here[3:5], full_cache(8, 2, seed=1)[[3, 5]])
    second.kill()

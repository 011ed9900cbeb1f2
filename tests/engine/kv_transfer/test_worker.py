from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
import torch
import zmq
from torch import Tensor

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.refusals import REFUSALS
from engine.errors import StartupError
from engine.kv_transfer.protocol.messages import (
    Attach,
    DropSource,
    KVWorkerAnswer,
    KVWorkerCommand,
    RankRefusals,
    Read,
    ReadEnded,
    StopRead,
)
from engine.kv_transfer.transport import tcp
from engine.kv_transfer.transport.head_map import HeadShard
from engine.kv_transfer.transport.worker import HeldLayers, KVTransferWorker
from tests.engine.kv_transfer.caches import SourceProcess, full_cache, shard_cache
from tests.engine.kv_transfer.link import Link
from tests.engine.kv_transfer.test_transports import needs_nixl
from tests.refused import Refused

TIMEOUT_MS = 60_000
ONE = HeadShard(2, 0, 1)


class Channel:
    """Commands workers, and hears of what they have read."""

    def __init__(self, *workers: KVTransferWorker):
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        port = self._inbox.bind_to_random_port("tcp://127.0.0.1")
        self._workers = [self._context.socket(zmq.PUSH) for _ in workers]
        for socket, worker in zip(self._workers, workers, strict=True):
            socket.connect(worker.address)
        self._ids = count(1)
        self.send(Attach(f"tcp://127.0.0.1:{port}"))

    def send(self, command: KVWorkerCommand) -> None:
        self.send_bytes(msgspec.msgpack.encode(command))

    def send_bytes(self, message: bytes) -> None:
        for socket in self._workers:
            socket.send(message)

    def start(self, epoch: int, ranks: list[dict[str, bytes]], remote: list[int], local: list[int]) -> int:
        read_id = next(self._ids)
        self.send(Read(read_id, epoch, ranks, remote, local))
        return read_id

    def ended(self) -> ReadEnded:
        while not isinstance(answer := self.answer(), ReadEnded):
            pass
        return answer

    def answer(self) -> KVWorkerAnswer:
        assert self._inbox.poll(TIMEOUT_MS), "no answer"
        return msgspec.msgpack.decode(self._inbox.recv(), type=KVWorkerAnswer)

    def read(self, epoch: int, ranks: list[dict[str, bytes]], remote: list[int], local: list[int]) -> list[ReadEnded]:
        """Return the answers of all workers, by rank."""
        read_id = self.start(epoch, ranks, remote, local)
        answers = sorted((self.ended() for _ in self._workers), key=lambda ended: ended.rank)
        assert {ended.read_id for ended in answers} == {read_id}
        return answers

    def silent(self) -> bool:
        return not self._inbox.poll(0)

    def close(self) -> None:
        self._context.destroy(linger=0)


class World:
    """Makes workers and channels, and closes them."""

    def __init__(self) -> None:
        self._open: list[KVTransferWorker | Channel | Link] = []

    def worker(
        self,
        cache: Tensor,
        shard: HeadShard = ONE,
        transport: str = "tcp",
        progress_s: float = 20.0,
        key: ClusterKey | None = None,
    ) -> KVTransferWorker:
        self._open.append(
            KVTransferWorker([cache], shards=[shard], transport=transport, progress_s=progress_s, key=key)
        )
        return self._open[-1]

    def groups(self, caches: list[Tensor]) -> KVTransferWorker:
        self._open.append(KVTransferWorker(caches, shards=[ONE] * len(caches), transport="tcp", progress_s=20.0))
        return self._open[-1]

    def engine(self, full: Tensor, size: int, transport: str = "tcp") -> list[KVTransferWorker]:
        shards = [HeadShard(full.shape[3], rank, size) for rank in range(size)]
        return [self.worker(shard_cache(full, shard), shard, transport) for shard in shards]

    def channel(self, *workers: KVTransferWorker) -> Channel:
        self._open.append(Channel(*workers))
        return self._open[-1]

    def link(self, source: KVTransferWorker) -> tuple[Link, dict[str, bytes]]:
        """A link to a source, and the description of the source over it."""
        link = Link.to(source.description["tcp"])
        self._open.append(link)
        return link, {**source.description, "tcp": link.describe(source.description["tcp"])}

    def close(self) -> None:
        for thing in reversed(self._open):
            thing.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.mark.parametrize(
    ("transport", "source", "reader"),
    [
        pytest.param(transport, *sizes, marks=[*marks, *[pytest.mark.slow] * (sizes not in some)])
        for transport, marks, some in (("tcp", [], [(1, 2), (4, 2)]), ("auto", [needs_nixl], [(1, 1), (2, 1)]))
        for sizes in ((1, 1), (1, 2), (2, 1), (4, 2))
    ],
)
def test_every_rank_reads_its_heads_and_says_so(world: World, transport: str, source: int, reader: int) -> None:
    full = full_cache(10, 2)
    sources = world.engine(full, source, transport)
    shards = [HeadShard(2, rank, reader) for rank in range(reader)]
    caches = [torch.zeros_like(shard_cache(full, shard)) for shard in shards]
    workers = [world.worker(cache, shard, transport) for cache, shard in zip(caches, shards, strict=True)]
    channel = world.channel(*workers)
    ranks = [worker.description for worker in sources]
    for remote, local in (([4, 5, 9], [1, 0, 2]), ([0], [3])):
        for rank, ended in enumerate(channel.read(7, ranks, remote, local)):
            assert (ended.rank, ended.error) == (rank, None)
            assert ended.transport == ("nixl" if transport == "auto" else transport)
            assert ended.num_bytes == caches[rank][remote].nbytes
            assert ended.seconds > 0
            assert torch.equal(caches[rank][local], shard_cache(full, shards[rank])[remote])


def test_a_read_moves_blocks_of_its_group_alone(world: World) -> None:
    sources = [full_cache(6, 2, seed=1), full_cache(4, 2, seed=2)[:, :1].contiguous()]
    caches = [torch.zeros_like(source) for source in sources]
    there, here = (world.groups(group) for group in (sources, caches))
    channel = world.channel(here)
    for group, (remote, local) in enumerate((([5, 0], [1, 3]), ([3, 1, 2], [0, 3, 2]))):
        others = [cache.clone() for cache in caches]
        channel.send(Read(100 + group, 7, [there.description], remote, local, group))
        ended = channel.ended()
        assert (ended.read_id, ended.error, ended.num_bytes) == (100 + group, None, caches[group][local].nbytes)
        assert torch.equal(caches[group][local], sources[group][remote])
        assert torch.equal(caches[1 - group], others[1 - group])


def big_cache(frames: int = 3) -> Tensor:
    return full_cache(frames * tcp.FRAME_BYTES // full_cache(1, 2).nbytes, 2)


def test_a_source_that_hangs_does_not_hold_up_another(world: World) -> None:
    there = big_cache()
    here = torch.zeros_like(torch.cat([there, there[:1]]))
    link, hanging = world.link(world.worker(there))
    channel = world.channel(world.worker(here))
    link.hold(after=100_000)
    ids = list(range(len(there)))
    first = channel.start(1, [hanging], ids, ids)
    link.wait_held()
    (ended,) = channel.read(2, [world.worker(there).description], [0], [len(there)])
    assert (ended.read_id, ended.error) == (first + 1, None)
    assert channel.silent()
    link.release()
    assert channel.ended().error is None
    assert torch.equal(here, torch.cat([there, there[:1]]))


def test_a_stopped_read_answers_once_and_its_blocks_stay_as_they_are(world: World) -> None:
    there, here = big_cache(), torch.zeros_like(big_cache())
    link, source = world.link(world.worker(there))
    channel = world.channel(world.worker(here))
    ids = list(range(len(there)))
    link.hold(after=1_500_000)
    first = channel.start(1, [source], ids, ids)
    second = channel.start(1, [source], ids, ids)
    link.wait_held()
    channel.send(StopRead(second))
    ended = channel.ended()
    assert (ended.read_id, ended.error) == (second, "stopped")
    channel.send(StopRead(first))
    channel.send(StopRead(first))
    ended = channel.ended()
    assert (ended.read_id, ended.error) == (first, "stopped")
    before = here.clone()
    link.release()
    (ended,) = channel.read(1, [source], [3], [0])
    assert ended.error is None
    assert torch.equal(here[1:], before[1:])
    channel.send(StopRead(first))  # long over
    assert channel.read(1, [source], [3], [0])[0].read_id == ended.read_id + 1


def test_a_dropped_source_ends_its_reads_and_another_epoch_is_read(world: World) -> None:
    there, here = big_cache(), torch.zeros_like(big_cache())
    link, source = world.link(world.worker(there))
    channel = world.channel(world.worker(here))
    ids = list(range(len(there)))
    link.hold(after=1_500_000)
    started = {channel.start(1, [source], ids, ids) for _ in range(3)}
    link.wait_held()
    channel.send(DropSource(5))  # never heard of
    channel.send(DropSource(1))
    answers = [channel.ended() for _ in range(3)]
    assert {ended.read_id for ended in answers} == started
    assert {ended.error for ended in answers} == {"stopped"}
    before = here.clone()
    link.release()
    (ended,) = channel.read(2, [world.worker(there).description], [0], [0])
    assert ended.error is None
    assert torch.equal(here[1:], before[1:])


def test_a_link_on_which_nothing_comes_fails_the_read(world: World) -> None:
    there, here = big_cache(), torch.zeros_like(big_cache())
    link, source = world.link(world.worker(there))
    channel = world.channel(world.worker(here, progress_s=0.3))
    ids = list(range(len(there)))
    link.hold(after=1_500_000)
    (ended,) = channel.read(1, [source], ids, ids)
    assert ended.error == "no progress for 0.3 s"


def test_a_corrupt_frame_fails_the_read(world: World) -> None:
    there, here = big_cache(), torch.zeros_like(big_cache())
    link, source = world.link(world.worker(there))
    channel = world.channel(world.worker(here))
    ids = list(range(len(there)))
    link.corrupt(after=2_000_000)
    (ended,) = channel.read(1, [source], ids, ids)
    assert ended.error is not None and ended.error.startswith("checksum")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", pytest.param("auto", marks=[needs_nixl, pytest.mark.slow])])
def test_a_killed_source_fails_its_reads_and_its_successor_is_read(world: World, transport: str) -> None:
    old, new = SourceProcess(transport, 8), SourceProcess(transport, 8, seed=1)
    here = torch.zeros_like(full_cache(8, 2))
    channel = world.channel(world.worker(here, transport=transport, progress_s=2.0))
    assert channel.read(1, [old.description], [0], [0])[0].error is None
    old.kill()
    assert channel.read(1, [old.description], [1], [1])[0].error is not None
    channel.send(DropSource(1))
    (ended,) = channel.read(2, [new.description], [2, 3], [2, 3])
    assert ended.error is None
    assert torch.equal(here[[2, 3]], full_cache(8, 2, seed=1)[[2, 3]])
    new.kill()


@pytest.mark.parametrize(
    ("ranks", "remote", "local", "error"),
    [
        (3, [0], [0], "2 KV heads cannot be divided among 3 ranks"),
        (0, [0], [0], "a source has at least one rank"),
        (1, [0, 1], [0], "2 blocks cannot be read into 1"),
        (1, [99], [0], "blocks must be below 10"),
    ],
)
def test_a_read_that_makes_no_sense_is_answered_and_harms_nothing(
    world: World, ranks: int, remote: list[int], local: list[int], error: str
) -> None:
    there, here = full_cache(10, 2), full_cache(10, 2, seed=1)
    source = world.worker(there).description
    channel = world.channel(world.worker(here))
    (ended,) = channel.read(1, [source] * ranks, remote, local)
    assert ended.error is not None and error in ended.error
    assert channel.read(1, [source], [4], [4])[0].error is None
    assert torch.equal(here[4], there[4])


def test_a_malformed_command_is_dropped(world: World) -> None:
    there, here = full_cache(10, 2), full_cache(10, 2, seed=1)
    channel = world.channel(world.worker(here))
    channel.send_bytes(b"nonsense")
    channel.send_bytes(msgspec.msgpack.encode({"type": "Read"}))
    assert channel.read(1, [world.worker(there).description], [4], [4])[0].error is None


def test_a_rank_above_0_tells_what_it_has_refused(world: World) -> None:
    """Rank 0 reads its own counts, since its worker shares its process with the channel."""
    refused = Refused("kv_worker_commands", "malformed")
    channel = world.channel(world.worker(full_cache(10, 1), HeadShard(2, 1, 2)))
    channel.send_bytes(b"nonsense")
    refused.wait_for(1)
    told = channel.answer()
    while not (isinstance(told, RankRefusals) and told.counts == REFUSALS.counts()):
        told = channel.answer()
    assert told.rank == 1


def test_a_stranger_commands_no_worker(world: World) -> None:
    refused = Refused("kv_worker_commands", "unauthenticated")
    worker = world.worker(full_cache(10, 2), key=ClusterKey.generate())
    world.channel(worker)
    refused.wait_for(1)


def test_engines_without_a_common_transport_say_so(world: World) -> None:
    channel = world.channel(world.worker(full_cache(10, 2)))
    (ended,) = channel.read(1, [{"nixl": b""}], [4], [4])
    assert ended.error == "no transport in common: tcp here, nixl there"


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        ([(0, 1)], "the source does not hold each layer of KV cache group 0 once"),
        ([], "the source has no KV cache group 0"),
        (None, "the source does not say which layers its ranks hold"),
    ],
)
def test_a_source_whose_layers_are_others_or_unknown_is_not_read(
    world: World, layers: list[tuple[int, int]] | None, error: str
) -> None:
    here = torch.zeros_like(full_cache(4, 2))
    source = {key: value for key, value in world.worker(full_cache(4, 2)).description.items() if key != "layers"}
    if layers is not None:
        source["layers"] = msgspec.msgpack.encode(HeldLayers(0, layers))
    (ended,) = world.channel(world.worker(here)).read(1, [source], [0], [1])
    assert ended.error == error
    assert not here.any()


def test_auto_takes_tcp_where_nixl_cannot_be_imported(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with caplog.at_level("INFO"):
        worker = world.worker(full_cache(4, 2), transport="auto")
    assert list(worker.description) == ["tcp", "layers"]
    assert "kv travels over tcp, because nixl is unavailable" in caplog.text


def test_nixl_that_was_asked_for_and_cannot_be_imported_is_a_startup_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(StartupError, match="is nixl, which is unavailable"):
        world.worker(full_cache(4, 2), transport="nixl")


def test_an_address_of_another_host_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"tcp cannot listen at 192.0.2.1"):
        KVTransferWorker([full_cache(4, 2)], shards=[ONE], host="192.0.2.1", transport="tcp")


@needs_nixl
def test_auto_goes_on_over_tcp_when_nixl_has_failed_with_a_source(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = full_cache(10, 2), full_cache(10, 2, seed=1)
    source = {**world.worker(there, transport="auto").description, "nixl": b"spoilt"}
    channel = world.channel(world.worker(here, transport="auto"))
    with caplog.at_level("INFO"):
        (failed,) = channel.read(1, [source], [4], [4])
        (ended,) = channel.read(1, [source], [4], [4])
    assert failed.transport == "nixl" and failed.error is not None
    assert ended.transport == "tcp" and ended.error is None
    assert "travels over nixl: both have it" in caplog.text
    assert "travels over tcp: nixl has failed" in caplog.text
    assert torch.equal(here[4], there[4])


def test_a_worker_that_closes_stops_its_reads(world: World) -> None:
    there, here = big_cache(), torch.zeros_like(big_cache())
    link, source = world.link(world.worker(there))
    worker = world.worker(here)
    channel = world.channel(worker)
    ids = list(range(len(there)))
    link.hold(after=1_500_000)
    channel.start(1, [source], ids, ids)
    link.wait_held()
    worker.close()
    before = here.clone()
    link.release()
    assert torch.equal(here, before)

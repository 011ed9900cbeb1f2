"""One rank's tiers: threads that copy, write and read."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.kv_offload.disk import DiskFolder
from engine.kv_offload.sealing import Sealer
from engine.kv_offload.store import StoreFolder, Unreachable
from engine.kv_offload.store_lister import StoreLister
from engine.kv_offload.tier_worker import TierWorker
from engine.wire.parts.kv_offload import (
    DropBlocks,
    LoadBlocks,
    StopLoad,
    StoreBlocks,
    StoreListing,
    TierAnswer,
    TierBlock,
)

SHAPES = [(4, 2, 2, 1, 4, 8), (3, 1, 1, 1, 1, 24)]  # of a group of KV blocks, and of snapshots
WAIT_S = 30.0


class Rank:
    def __init__(self, root, host_slots=(4, 3), list_s=3600.0):
        self.caches = [torch.rand(shape) for shape in SHAPES]
        self.before = [cache.clone() for cache in self.caches]
        self.disk = DiskFolder(root, "scope", Sealer(b"k" * 32, "scope"))
        self.store_folder = StoreFolder(str(root / "store"), "scope", Sealer(b"k" * 32, "scope"))
        self.came = threading.Event()
        self.worker = TierWorker(
            self.caches,
            host_slots=host_slots,
            disk=self.disk,
            store=self.store_folder,
            lister=StoreLister(self.store_folder, list_s),
            wake=self.came.set,
        )
        self._answers: list[TierAnswer] = []

    def answer(self) -> TierAnswer:
        while not self._answers:
            assert self.came.wait(WAIT_S)
            self.came.clear()
            self._answers += self.worker.answers()
        return self._answers.pop(0)

    def store(self, number: int, blocks: list[TierBlock]) -> TierAnswer:
        self.worker.submit(StoreBlocks(number, blocks))
        assert self.answer() == TierAnswer(number, copied=True)
        return self.answer()

    def load(self, number: int, blocks: list[TierBlock]) -> TierAnswer:
        self.worker.submit(LoadBlocks(number, blocks))
        return self.answer()


@pytest.fixture
def rank(tmp_path):
    rank = Rank(tmp_path)
    yield rank
    rank.worker.close()
    rank.disk.close()


def blocks(**place) -> list[TierBlock]:
    """Two blocks and a snapshot."""
    return [TierBlock(group, block, bytes([group, block] * 8), **place) for group, block in ((0, 1), (0, 3), (1, 2))]


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_blocks_come_back_into_other_blocks(rank, tier):
    place = {"in_store": True} if tier == "store" else {"on_disk": True}
    stored = [block._replace(slot=-1 if tier == "store" else block.block, **place) for block in blocks()]
    assert rank.store(1, stored) == TierAnswer(1)
    for cache in rank.caches:
        cache.zero_()
    place |= {"on_disk": tier == "disk"}
    loaded = [b._replace(block=b.block - 1, slot=b.slot if tier == "host" else -1, **place) for b in stored]
    assert rank.load(2, loaded) == TierAnswer(2)
    for block, old in zip(loaded, stored, strict=True):
        assert torch.equal(rank.caches[block.group][block.block], rank.before[block.group][old.block])


def test_a_block_that_is_gone_or_damaged_fails_alone(rank):
    assert rank.store(1, blocks(on_disk=True)) == TierAnswer(1)
    first, second, third = blocks(on_disk=True)
    rank.worker.submit(DropBlocks([first.name]))
    file = rank.disk._file(second.name)
    file.write_bytes(file.read_bytes()[:-1])
    rank.caches[1].zero_()
    # the deletion comes after the writes before it, and is not answered: another store ends after it
    assert rank.store(2, blocks(slot=0)[:1]) == TierAnswer(2)
    assert rank.load(3, [first, second, third]) == TierAnswer(3, failed=[0, 1])
    assert torch.equal(rank.caches[0], rank.before[0]), "blocks that failed were written"
    assert torch.equal(rank.caches[1][2], rank.before[1][2])


def test_a_load_that_is_stopped_writes_no_more(rank, monkeypatch):
    assert rank.store(1, blocks(on_disk=True)) == TierAnswer(1)
    reading, go_on, read = threading.Event(), threading.Event(), rank.disk.read

    def slow(name: bytes) -> bytes:
        reading.set()
        assert go_on.wait(WAIT_S)
        return read(name)

    monkeypatch.setattr(rank.disk, "read", slow)
    for cache in rank.caches:
        cache.zero_()
    rank.worker.submit(LoadBlocks(2, blocks(on_disk=True)))
    assert reading.wait(WAIT_S)
    rank.worker.submit(StopLoad(2))
    assert rank.answer() == TierAnswer(2, failed=[0, 1, 2])
    go_on.set()
    assert rank.load(3, blocks(on_disk=True)[:1]) == TierAnswer(3)
    assert not rank.caches[0][3].any() and not rank.caches[1].any()


def test_a_disk_that_takes_no_more_fails_what_is_left(rank, monkeypatch):
    write = rank.disk.write

    def full(name: bytes, block: memoryview) -> None:
        if name == blocks()[1].name:
            raise OSError(28, "No space left on device")
        write(name, block)

    monkeypatch.setattr(rank.disk, "write", full)
    assert rank.store(1, blocks(on_disk=True)) == TierAnswer(1, failed=[1, 2])


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("Data too long")])
@pytest.mark.parametrize(("folder", "place"), [("disk", "on_disk"), ("store_folder", "in_store")])
def test_a_store_is_answered_whatever_happens(rank, monkeypatch, error, folder, place):
    def fail(name: bytes, block: memoryview) -> None:
        raise error

    monkeypatch.setattr(getattr(rank, folder), "write", fail)
    assert rank.store(1, blocks(**{place: True})) == TierAnswer(1, failed=[0, 1, 2])


def test_a_store_that_is_away_says_so_and_one_that_lost_a_block_does_not(rank, monkeypatch):
    assert rank.store(1, blocks(in_store=True)) == TierAnswer(1)
    first, second, third = blocks(in_store=True)
    rank.store_folder.delete([first.name])
    assert rank.load(2, [first, second]) == TierAnswer(2, failed=[0])

    def away(name: bytes) -> bytes:
        raise Unreachable("the network is down")

    monkeypatch.setattr(rank.store_folder, "read", away)
    assert rank.load(3, [second, third]) == TierAnswer(3, failed=[0, 1], is_unreachable=True)


def test_what_other_engines_do_to_the_store_is_reported(tmp_path):
    other = StoreFolder(str(tmp_path / "store"), "scope", Sealer(b"k" * 32, "scope"))
    other.write(bytes(16), memoryview(b"theirs"))
    rank = Rank(tmp_path, list_s=0.01)
    found: list[StoreListing] = []

    def listing() -> StoreListing:
        while not found:
            assert rank.came.wait(WAIT_S)
            rank.came.clear()
            found.extend(rank.worker.listings())
        return found.pop(0)

    assert [block.name for block in listing().added] == [bytes(16)]
    other.delete([bytes(16)])
    assert listing().removed == [bytes(16)]
    rank.worker.close()
    rank.disk.close()


def test_a_disk_that_hangs_does_not_keep_what_is_in_host_memory(rank, monkeypatch):
    stored = [block._replace(slot=block.block, on_disk=True) for block in blocks()]
    assert rank.store(1, stored) == TierAnswer(1)
    go_on = threading.Event()
    monkeypatch.setattr(rank.disk, "read", lambda name: go_on.wait())
    try:
        rank.worker.submit(LoadBlocks(2, blocks(on_disk=True) * 2))  # more than there are readers
        assert rank.load(3, [block._replace(on_disk=False) for block in stored]) == TierAnswer(3)
        rank.worker.submit(StopLoad(2))
        assert rank.answer().number == 2
    finally:
        go_on.set()

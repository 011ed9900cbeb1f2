"""Moves blocks between the device and the tiers of one rank, in threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from engine.kv_offload.block_memory import DeviceBlocks
from engine.kv_offload.disk import DiskFolder
from engine.kv_offload.sealing import Unsealable
from engine.kv_offload.store import StoreFolder, Unreachable
from engine.kv_offload.store_lister import StoreLister
from engine.wire.parts.kv_offload import (
    DropBlocks,
    LoadBlocks,
    StopLoad,
    StoreBlocks,
    StoreListing,
    TierAnswer,
    TierBlock,
    TierCommand,
)

logger = logging.getLogger(__name__)

READERS = 4  # threads: a disk is faster if it is asked for several blocks at a time
GETTERS = 8  # threads: a store takes longer to answer, and answers many at a time
PUTTERS = 4
CLOSE_S = 2.0  # that `close` waits for all threads

Task = Callable[[], None]


def num_answers(command: TierCommand) -> int:
    """Return how many answers a command gets."""
    return {StoreBlocks: 2, LoadBlocks: 1}.get(type(command), 0)


class TaskThreads:
    """Daemon threads that run tasks in order. The process can end even if a thread hangs in a system call, for instance
    on a dead network disk."""

    def __init__(self, name: str, count: int = 1):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self, deadline: float) -> None:
        """Finish the queued tasks, at most until `deadline` (of time.monotonic)."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a block could not be moved")


class RankLoad:
    """State of a LoadBlocks command that is under way on one rank."""

    def __init__(self, command: LoadBlocks):
        self.command = command
        self.left = set(range(len(command.blocks)))
        self.failed: list[int] = []
        self.is_unreachable = False
        self.lock = threading.Lock()  # held while a block is written: once a load is stopped, none is


class RankStore:
    """State of a StoreBlocks command whose blocks are being written to the store. After the first failure, no other
    block is tried."""

    def __init__(self, command: StoreBlocks):
        self.command = command
        self.left = len(command.blocks)
        self.failed: list[int] = []
        self.lock = threading.Lock()


class TierWorker:
    """One rank's tiers. Threads carry out the commands, so `submit` never waits. While a disk or store hangs, few
    commands queue up: the engine has only few loads and stores under way, and deletes only what its index had.

    A block from disk is checked and decrypted in host memory. It is copied to the device only if the load has not been
    stopped meanwhile, so a disk that hangs never holds a block on the device.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        *,
        host_slots: Sequence[int] = (),
        rank: int = 0,
        disk: DiskFolder | None = None,
        store: StoreFolder | None = None,
        lister: StoreLister | None = None,
        wake: Callable[[], None] = lambda: None,
    ):
        """caches: as for DeviceBlocks. host_slots: number of blocks of each group that fit in host memory; empty
        without this tier. lister: of the store, on rank 0. wake: function called from a thread when `answers` has
        something new."""
        self._device, self._disk, self._store, self.wake = DeviceBlocks(caches), disk, store, wake
        self._rank = rank
        self._host = [self._device.buffer(group, count) for group, count in enumerate(host_slots)]
        self._loads: dict[int, RankLoad] = {}
        self._listings: queue.SimpleQueue[StoreListing] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        self._copier, self._writer = TaskThreads("kv copy"), TaskThreads("kv write")
        self._loader, self._readers = TaskThreads("kv load"), TaskThreads("kv read", READERS)
        self._threads = [self._copier, self._writer, self._loader, self._readers]
        self._closing = threading.Event()
        if store is not None:
            self._getters, self._putters = TaskThreads("kv get", GETTERS), TaskThreads("kv put", PUTTERS)
            self._threads += [self._putters, self._getters]
        if lister is not None:
            run = lister.run
            threading.Thread(target=run, args=(self._listed, self._closing), name="kv list", daemon=True).start()

    def submit(self, command: TierCommand) -> None:
        match command:
            case StoreBlocks():
                self._copier.submit(lambda: self._copy(command))
            case LoadBlocks(number, blocks):
                load = self._loads[number] = RankLoad(command)
                for index, block in enumerate(blocks):
                    self._threads_for(block).submit(lambda index=index: self._load(load, index))  # type: ignore[misc]
            case StopLoad(number):
                if stopped := self._loads.get(number):
                    with stopped.lock:
                        stopped.failed += sorted(stopped.left)
                        stopped.left.clear()
                        self._end(stopped)
            case DropBlocks(names, in_store):
                if not in_store:
                    self._writer.submit(lambda: self._drop(names))
                elif (store := self._store) is not None and not self._rank:
                    self._putters.submit(lambda: self._drop_in(store, names))

    def _threads_for(self, block: TierBlock) -> TaskThreads:
        """Return the threads that load a block: those of its tier, since a disk or store may hang."""
        if block.in_store:
            return self._getters
        return self._readers if block.on_disk else self._loader

    def answers(self) -> list[TierAnswer]:
        """Return the answers since the last call."""
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def listings(self) -> list[StoreListing]:
        """Return what the store has gained and lost since the last call; only on rank 0."""
        return [self._listings.get() for _ in range(self._listings.qsize())]

    def close(self) -> None:
        """Write the blocks already copied from the device, and end the threads, within CLOSE_S."""
        deadline = time.monotonic() + CLOSE_S
        self._closing.set()
        for threads in self._threads:
            threads.close(deadline)

    # -- down ----------------------------------------------------------------------------------------------

    def _copy(self, command: StoreBlocks) -> None:
        copies = []
        try:
            with self._device.current():
                for block in command.blocks:
                    group, slot = block.group, block.slot
                    copies.append(self._device.buffer(group)[0] if slot < 0 else self._host[group][slot])
                    self._device.read(group, block.block, copies[-1])
                self._device.finish()
        except Exception:
            copies.clear()
            raise
        finally:  # without an answer the blocks would be kept
            self._answer(TierAnswer(command.number, copied=True))
            if copies and command.blocks[0].in_store:
                state = RankStore(command)
                for index, copied in enumerate(copies):
                    self._putters.submit(lambda index=index, copied=copied: self._put(state, index, copied))  # type: ignore[misc]
            else:
                self._writer.submit(lambda: self._write(command, copies))

    def _write(self, command: StoreBlocks, copies: list[Tensor]) -> None:
        failed = list(range(len(copies), len(command.blocks)))
        for index, copy in enumerate(copies):
            block = command.blocks[index]
            if not block.on_disk or self._disk is None:
                continue
            try:
                self._disk.write(block.name, copy.numpy().data)
            except Exception as error:  # noqa: BLE001 - without an answer no other store would follow
                logger.warning("a block could not be written to %s: %r", self._disk.path, error)
                failed += range(index, len(copies))  # the disk is full, or broken
                break
        self._answer(TierAnswer(command.number, failed=sorted(set(failed))))

    def _put(self, state: RankStore, index: int, copied: Tensor) -> None:
        """Write one block of a command to the store. The last call for the command also answers it."""
        assert self._store is not None
        error: Exception | None = None
        if not state.failed:
            try:
                self._store.write(state.command.blocks[index].name, copied.numpy().data)
            except Exception as raised:  # noqa: BLE001 - without an answer no other store would follow
                logger.warning("a block could not be written to %s: %s", self._store.url, raised)
                error = raised
        with state.lock:
            state.left -= 1
            if error is not None or state.failed:
                state.failed.append(index)
            if not state.left:
                self._answer(TierAnswer(state.command.number, failed=sorted(state.failed)))

    def _drop(self, names: list[bytes]) -> None:
        if self._disk is not None:
            for name in names:
                self._disk.delete(name)

    def _drop_in(self, store: StoreFolder, names: list[bytes]) -> None:
        try:
            store.delete(names)
        except Unreachable as error:  # they are deleted when they are too old, or evicted by another engine
            logger.warning("%d blocks could not be deleted in %s: %s", len(names), store.url, error)

    def _listed(self, listing: StoreListing) -> None:
        self._listings.put(listing)
        self.wake()

    # -- up ------------------------------------------------------------------------------------------------

    def _load(self, load: RankLoad, index: int) -> None:
        if index not in load.left:
            return  # it was stopped
        block, is_unreachable = load.command.blocks[index], False
        try:
            source = self._read(block)
        except (OSError, Unsealable, Unreachable) as error:
            logger.warning("a block could not be read: %s", error)
            source, is_unreachable = None, isinstance(error, Unreachable)
        except Exception:
            logger.exception("a block could not be read")
            source = None
        with load.lock, self._device.current():
            if index not in load.left:
                return
            if source is None:
                load.failed.append(index)
                load.is_unreachable |= is_unreachable
            else:
                self._device.write(block.group, block.block, source)
            load.left.remove(index)
            if not load.left:
                self._end(load)

    def _read(self, block: TierBlock) -> Tensor | bytes:
        if block.slot >= 0:
            return self._host[block.group][block.slot]
        folder = self._store if block.in_store else self._disk
        assert folder is not None
        data = folder.read(block.name)
        if len(data) != self._device.block_bytes[block.group]:
            raise Unsealable(f"{len(data)} bytes, not {self._device.block_bytes[block.group]}")
        return data

    def _end(self, load: RankLoad) -> None:
        if self._loads.pop(load.command.number, None) is not None:
            failed, is_unreachable = sorted(load.failed), load.is_unreachable
            self._answer(TierAnswer(load.command.number, failed=failed, is_unreachable=is_unreachable))

    def _answer(self, answer: TierAnswer) -> None:
        self._answers.put(answer)
        self.wake()

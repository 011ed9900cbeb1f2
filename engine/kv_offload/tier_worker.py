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
from engine.wire.kv_offload import DropBlocks, LoadBlocks, StopLoad, StoreBlocks, TierAnswer, TierBlock, TierCommand

logger = logging.getLogger(__name__)

READERS = 4  # threads: a disk is faster if it is asked for several blocks at a time
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
        self.lock = threading.Lock()  # held while a block is written: once a load is stopped, none is


class TierWorker:
    """One rank's tiers. Threads carry out the commands, so `submit` never waits.

    A block from disk is checked and decrypted in host memory. It is copied to the device only if the load has not been
    stopped meanwhile, so a disk that hangs never holds a block on the device.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        *,
        host_slots: Sequence[int] = (),
        disk: DiskFolder | None = None,
        wake: Callable[[], None] = lambda: None,
    ):
        """caches: as for DeviceBlocks. host_slots: number of blocks of each group that fit in host memory; empty
        without this tier. wake: function called from a thread when `answers` has something new."""
        self._device, self._disk, self.wake = DeviceBlocks(caches), disk, wake
        self._host = [self._device.buffer(group, count) for group, count in enumerate(host_slots)]
        self._loads: dict[int, RankLoad] = {}
        self._answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        self._copier, self._writer = TaskThreads("kv copy"), TaskThreads("kv write")
        self._loader, self._readers = TaskThreads("kv load"), TaskThreads("kv read", READERS)

    def submit(self, command: TierCommand) -> None:
        match command:
            case StoreBlocks():
                self._copier.submit(lambda: self._copy(command))
            case LoadBlocks(number, blocks):
                load = self._loads[number] = RankLoad(command)
                for index, block in enumerate(blocks):
                    threads = self._readers if block.slot < 0 else self._loader  # a disk may hang
                    threads.submit(lambda index=index: self._load(load, index))  # type: ignore[misc]
            case StopLoad(number):
                if stopped := self._loads.get(number):
                    with stopped.lock:
                        stopped.failed += sorted(stopped.left)
                        stopped.left.clear()
                        self._end(stopped)
            case DropBlocks(names):
                self._writer.submit(lambda: self._drop(names))

    def answers(self) -> list[TierAnswer]:
        """Return the answers since the last call."""
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def close(self) -> None:
        """Write the blocks already copied from the device, and end the threads, within CLOSE_S."""
        deadline = time.monotonic() + CLOSE_S
        for threads in (self._copier, self._writer, self._loader, self._readers):
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

    def _drop(self, names: list[bytes]) -> None:
        if self._disk is not None:
            for name in names:
                self._disk.delete(name)

    # -- up ------------------------------------------------------------------------------------------------

    def _load(self, load: RankLoad, index: int) -> None:
        if index not in load.left:
            return  # it was stopped
        block = load.command.blocks[index]
        try:
            source = self._read(block)
        except (OSError, Unsealable) as error:
            logger.warning("a block could not be read: %s", error)
            source = None
        except Exception:
            logger.exception("a block could not be read")
            source = None
        with load.lock, self._device.current():
            if index not in load.left:
                return
            if source is None:
                load.failed.append(index)
            else:
                self._device.write(block.group, block.block, source)
            load.left.remove(index)
            if not load.left:
                self._end(load)

    def _read(self, block: TierBlock) -> Tensor | bytes:
        if block.slot >= 0:
            return self._host[block.group][block.slot]
        assert self._disk is not None
        data = self._disk.read(block.name)
        if len(data) != self._device.block_bytes[block.group]:
            raise Unsealable(f"{len(data)} bytes, not {self._device.block_bytes[block.group]}")
        return data

    def _end(self, load: RankLoad) -> None:
        if self._loads.pop(load.command.number, None) is not None:
            self._answer(TierAnswer(load.command.number, failed=sorted(load.failed)))

    def _answer(self, answer: TierAnswer) -> None:
        self._answers.put(answer)
        self.wake()

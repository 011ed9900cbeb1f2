"""Tiers without memory and files, which carry out any part of a command at any time, and may fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.core.door.inputs import TimePassed
from engine.core.kv_cache_manager import KVCacheManager
from engine.kv_offload.tier_index import TierIndex
from engine.parts.kv_tiers.inputs import TiersAnswered
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.serving.hash_changes import HashChanges
from engine.wire.parts.kv_offload import (
    DropBlocks,
    FoundBlock,
    LoadBlocks,
    StopLoad,
    StoreBlocks,
    StoreListing,
    TierAnswer,
    TierBlock,
)
from tests.fake_runner import Harness

TIMEOUT_S = 2.0
Choose = Callable[[int], Iterable[int]]
"""number of blocks -> indices of those that fail"""


def name_of(group: int, block_hash: bytes) -> bytes:
    return hashlib.blake2b(block_hash, digest_size=16, salt=group.to_bytes(2, "little")).digest()


@dataclass
class Moving:
    """A command under way."""

    command: StoreBlocks | LoadBlocks
    copies: list[object] | None = None
    """What a store has read so far."""
    done: set[int] = field(default_factory=set)
    """Blocks that a load has written."""


class TierHarness(Harness):
    """A scheduler with tiers below its cache."""

    def __init__(
        self,
        *,
        host_slots: int = 0,
        disk_blocks: int = 0,
        store_blocks: int = 0,
        min_tokens: int = 1,
        found: TierHarness | None = None,
        **options,
    ):
        """host_slots: of each KV cache group. disk_blocks, store_blocks: of all together. found: engine whose disk and
        store this one finds at its start."""
        self.found = found
        self.all_options = {"host_slots": host_slots, "disk_blocks": disk_blocks, "store_blocks": store_blocks,
                             "min_tokens": min_tokens, **options}  # fmt: skip
        self._host_slots, self._disk_blocks, self._min_tokens = host_slots, disk_blocks, min_tokens
        self._store_blocks = store_blocks
        self.store: dict[bytes, object] = {}
        """What all engines share."""
        self.written: dict[bytes, object] = {}
        """All that was ever in the store."""
        self.listed: set[bytes] = set()
        """What was there at the last listing, or was written since."""
        self.host: dict[tuple[int, int], object] = {}  # by group and slot
        self.disk: dict[bytes, object] = {}
        self.moving: dict[int, Moving] = {}
        self.is_unreachable = False
        """Whether the next load fails since the store cannot be reached."""
        self.answers: list[TierAnswer] = []
        super().__init__(**options)
        if found is not None:
            self.now, self.disk, self.store, self.written = found.now, found.disk, found.store, found.written
            for name in self.disk if disk_blocks else ():
                self.offloading.restore(name, 1, self.now)
            self.scheduler.apply(TimePassed(), self.now)
            if store_blocks:
                self.list()
        self.announced: set[bytes] = set()
        """Blocks that a router believes to be here."""
        self.changes = HashChanges()
        self.pool.observers.append(self.changes)
        self.offloading.hashes.track(True)

    def make_offloading(self, kv_cache: KVCacheManager) -> KVOffloading:
        groups, tiers = len(kv_cache.groups), []
        if self._host_slots:
            slots = [TierIndex(self._host_slots, slots=True) for _ in range(groups)]
            tiers.append(Tier("host", slots, [1] * groups, [1] * groups))
        if self._disk_blocks:
            tiers.append(Tier("disk", [TierIndex(self._disk_blocks)], [1] * groups, [1]))
        if self._store_blocks:
            tiers.append(Tier("store", [TierIndex(self._store_blocks)], [1] * groups, [1]))
        return KVOffloading(
            kv_cache,
            tiers,
            name_of=name_of,
            times=self.step_times,
            timeout_s=TIMEOUT_S,
            block_bytes=[1] * groups,
            min_tokens=self._min_tokens,
        )

    def restarted(self, **changes) -> TierHarness:
        """Return an engine that finds what this one has left on disk and in the store. changes: of its options."""
        return type(self)(found=self, **{**self.all_options, **changes})

    @property
    def offloading(self) -> KVOffloading:
        return self.scheduler.parts[KVOffloading]

    # -- what an engine does -------------------------------------------------------------------------------

    def take_answers(self) -> None:
        answers, self.answers = self.answers, []
        if answers:
            self.scheduler.apply(TiersAnswered(answers), self.now)
        self.scheduler.check()

    def submit(self) -> None:
        for command in self.scheduler.take_messages("tiers"):
            match command:
                case StopLoad(number):
                    if number in self.moving:
                        self._end(number, set(range(len(self.moving[number].command.blocks))))
                case DropBlocks(names, in_store):
                    for name in names:
                        (self.store if in_store else self.disk).pop(name, None)
                case _:
                    self.moving[command.number] = Moving(command)
        stored, removed = self.changes.take()
        hashes = self.offloading.hashes
        self.announced = self.announced - set(hashes.gone(removed)) | set(stored)
        assert self.announced == {*self.pool.block_hashes(), *hashes.all()}, "a router is wrong"

    def settle(self) -> None:
        if not self.answers:
            self.progress(min(self.moving))

    def pass_time(self) -> None:
        """Let the tiers go on while nothing is planned."""
        self.scheduler.apply(TimePassed(), self.now)
        self.submit()

    def drain(self) -> None:
        self.pass_time()
        self.take_answers()
        while self.moving or self.answers:
            for number in list(self.moving):
                self.progress(number)
            self.take_answers()
            self.pass_time()

    # -- what a rank does ----------------------------------------------------------------------------------

    def progress(self, number: int, failing: Choose = lambda count: ()) -> None:
        """Go on with a command: a store copies, then writes; a load writes what it has not written yet."""
        moving = self.moving[number]
        blocks, failed = moving.command.blocks, set(failing(len(moving.command.blocks)))
        if isinstance(moving.command, LoadBlocks):
            self._end(number, {i for i in range(len(blocks)) if not self.write(number, i, i in failed)})
        elif moving.copies is None:
            moving.copies = [self._read(block) for block in blocks]
            self.answers.append(TierAnswer(number, copied=True))
        else:
            for i, block in enumerate(blocks):
                if i not in failed and block.slot >= 0:
                    self.host[block.group, block.slot] = moving.copies[i]
                if i not in failed and block.on_disk:
                    self.disk[block.name] = moving.copies[i]
                if i not in failed and block.in_store:
                    self.store[block.name] = self.written[block.name] = moving.copies[i]
                    self.listed.add(block.name)
            self._end(number, failed)

    def list(self) -> None:
        """Tell the engine what other engines have written and deleted."""
        added = [FoundBlock(name, 1, 0.0) for name in self.store if name not in self.listed]
        removed = [name for name in self.listed if name not in self.store]
        self.listed = set(self.store)
        self.scheduler.apply(TiersAnswered([StoreListing(added, removed)]), self.now)
        self.scheduler.apply(TimePassed(), self.now)
        self.scheduler.check()

    def write(self, number: int, index: int, fails: bool = False) -> bool:
        """Write one block of a load, unless it fails. Returns whether it is written."""
        moving = self.moving[number]
        if index in moving.done:
            return True
        block = moving.command.blocks[index]
        folder = self.store if block.in_store else self.disk
        found = folder.get(block.name) if block.slot < 0 else self.host[block.group, block.slot]
        if fails or found is None:
            return False
        moving.done.add(index)
        size, runner = self.config.block_size, self.runner
        if block.group < len(runner.kvs):
            runner.kvs[block.group].update({block.block * size + i: cell for i, cell in enumerate(found)})
        else:
            runner.snapshots[block.block] = found
        return True

    def _read(self, block: TierBlock) -> object:
        size, runner = self.config.block_size, self.runner
        if block.group == len(runner.kvs):
            return runner.snapshots[block.block]
        return [runner.kvs[block.group][block.block * size + i] for i in range(size)]

    def _end(self, number: int, failed: set[int]) -> None:
        moving = self.moving.pop(number)
        is_unreachable, self.is_unreachable = self.is_unreachable, False
        self.answers.append(TierAnswer(number, failed=sorted(failed - moving.done), is_unreachable=is_unreachable))

"""Decides which blocks are copied from the KV cache to tiers below it, and when. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.core.kv_cache_manager import KVCacheManager
from engine.parts.kv_tiers.command_queue import CommandQueue
from engine.parts.kv_tiers.prefix_pins import pin, unpin
from engine.parts.kv_tiers.tier import Tier, TierHashes, tiers_of
from engine.wire.parts.kv_offload import StoreBlocks, TierBlock

STORE_BYTES = 2**26  # copied by one command; its blocks cannot be evicted meanwhile
STORE_SHARE = 8  # and at most one of so many blocks of a group
LOOKED_AT = 1000  # blocks per step, of which most may be in the tiers already
WRITE_S = 30.0  # after which a command that writes blocks counts as late


@dataclass(slots=True, eq=False)
class Store:
    """A StoreBlocks command under way. Its blocks are pinned until they are copied."""

    blocks: list[TierBlock]
    started_at: float
    is_copied: bool = False
    is_void: bool = False
    """Whether the blocks that it writes have to be discarded."""
    discarded: set[bytes] = field(default_factory=set)
    """Names of single blocks that have to be discarded, unless a hold keeps them by then."""
    is_late: bool = False


class TierWriter:
    """Copies blocks to tiers that are written by the same commands. A command copies a limited number of blocks, and
    the next command waits for it, so that few blocks are pinned."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        tiers: Sequence[Tier],
        commands: CommandQueue,
        hashes: TierHashes,
        *,
        name_of: Callable[[int, bytes], bytes],
        block_bytes: Sequence[int],
    ):
        """name_of: returns the name of a block, given its group and hash. block_bytes: bytes of a block of each group
        on all ranks."""
        self._kv_cache, self._tiers, self._commands, self._hashes = kv_cache, tiers, commands, hashes
        self.name_of, self._bytes = name_of, block_bytes
        #: Number of blocks that were evicted before they were copied, or for which a tier had no room.
        self.not_stored = 0
        self._waiting: dict[tuple[int, bytes], None] = {}  # by group and hash; oldest first
        self._stores: dict[int, Store] = {}  # by number of the command

    @property
    def copying(self) -> list[Store]:
        """The commands whose blocks are pinned."""
        return [store for store in self._stores.values() if not store.is_copied]

    @property
    def flushed(self) -> bool:
        """Whether all blocks have been written, except those that cannot be."""
        return not (self._waiting or self._stores) or all(tier.rests for tier in self._tiers)

    def add(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Queue blocks, given by group and hash, to be copied to the tiers that lack them. If more blocks wait than the
        KV cache has, drops the oldest."""
        for key in keys:
            self._waiting.pop(key, None)
            self._waiting[key] = None
        while len(self._waiting) > sum(manager.pool.num_blocks for manager in self._kv_cache.groups):
            del self._waiting[next(iter(self._waiting))]  # evicted by now: the tier is too slow
            self.not_stored += 1

    def add_held(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Copy blocks that stay on the device. Those that already wait to be copied keep their turn."""
        for key in keys:
            self._waiting.setdefault(key)

    def discard(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Discard these blocks, whether they still wait or are being written."""
        for key in keys:
            self._waiting.pop(key, None)
        names = {self.name_of(*key) for key in keys} if self._stores else set()
        for store in self._stores.values():
            store.discarded |= names.intersection(block.name for block in store.blocks)

    def start(self, now: float) -> None:
        """Start to copy waiting blocks, unless two commands are still writing."""
        if len(self._stores) >= 2:
            return
        blocks: list[TierBlock] = []
        left = [max(1, manager.pool.num_blocks // STORE_SHARE) for manager in self._kv_cache.groups]
        size = 0
        for group, block_hash in list(islice(self._waiting, LOOKED_AT)):
            if not left[group] or size >= STORE_BYTES:
                break
            del self._waiting[group, block_hash]
            if block := self._place(group, block_hash, now):
                blocks.append(block)
                left[group] -= 1
                size += self._bytes[group]
        if blocks:
            number = self._commands.new_number()
            self._stores[number] = Store(blocks, now)
            self._commands.add(StoreBlocks(number, blocks))

    def _place(self, group: int, block_hash: bytes, now: float) -> TierBlock | None:
        """Pin a block, and make room for it in the tiers that lack it. Returns None if it need not or cannot be
        stored."""
        name, pool = self.name_of(group, block_hash), self._kv_cache.groups[group].pool
        slot, on_disk, in_store = -1, False, False
        for tier in self._tiers:
            index = tier.index(group)
            if index.knows(name):
                index.touch([name])
            elif pool.has(block_hash) and not tier.rests:
                evicted = index.add(name, tier.sizes[group], now)
                if evicted is None:
                    continue
                slot = max(slot, index.slot(name))
                on_disk, in_store = on_disk or tier.name == "disk", tier.name == "store"
                self._commands.drop(tier, evicted)
            else:
                self.not_stored += 1
        if slot < 0 and not on_disk and not in_store:
            return None
        self._hashes.add(group, name, block_hash)
        (block,) = pool.match([block_hash])
        pin(pool, [block])
        return TierBlock(group, block, name, slot, on_disk, in_store)

    def owns(self, number: int) -> bool:
        """Return whether a command comes from this writer and is still under way."""
        return number in self._stores

    def copied(self, number: int) -> None:
        """Record that the blocks of a command have been copied, so that they can be evicted."""
        store = self._stores[number]
        store.is_copied = True
        for block in reversed(store.blocks):
            unpin(self._kv_cache.groups[block.group].pool, block.block)

    def written(self, number: int, failed: set[int], now: float) -> None:
        """Record which blocks a command has written. A block that failed in one tier is removed from all."""
        store = self._stores.pop(number)
        for tier in self._tiers:
            blocks = [(i, block) for i, block in enumerate(store.blocks) if tier.takes(block)]
            for i, block in blocks:
                is_unwanted = block.name in store.discarded and block.name not in tier.index(block.group).held
                if store.is_void or is_unwanted or i in failed:
                    tier.index(block.group).remove(block.name)
                    self._commands.drop(tier, [block.name])
                else:
                    tier.index(block.group).written(block.name)
                    tier.moved["write"] += self._bytes[block.group]
            tier.seconds["write"] += now - store.started_at if blocks else 0.0
        if failed:
            tiers_of(self._tiers, [store.blocks[i] for i in failed])[-1].failed("write", len(failed), now)

    def check_deadlines(self, now: float) -> None:
        """Stop using a tier for REST_S if writing to it takes too long."""
        for store in self._stores.values():
            if now >= store.started_at + WRITE_S and not store.is_late:
                store.is_late = True  # it is still waited for: until then, no more of its blocks are in memory
                tiers_of(self._tiers, store.blocks)[-1].failed("deadline", len(store.blocks), now)

    def clear(self) -> None:
        """Discard the blocks that wait or are being written."""
        self._waiting.clear()
        for store in self._stores.values():
            store.is_void = True

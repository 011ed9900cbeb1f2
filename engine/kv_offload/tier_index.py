"""Index of the blocks in one tier, which also decides what to evict. Pure Python: no clock, no files."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

BUSY_S = 30.0  # after which a block that is too old, but was being moved or held, is looked at again


@dataclass(slots=True)
class TierEntry:
    """One block of a tier."""

    size: int
    added_at: float
    slot: int = -1
    """Number of its slot in a tier with slots of a fixed size; -1 in other tiers."""
    ready: bool = False
    """Whether it has been written, and can be read."""
    readers: int = 0


class NoUsage:
    """Does not measure for how long a tier keeps blocks. TierUsage (engine/costs) does."""

    def added(self, name: bytes, size: int) -> None:
        """Record that there is a new block."""

    def removed(self, name: bytes, size: int) -> None:
        """Record that a block is gone."""


class TierIndex:
    """The blocks of one tier by name, least recently used first. Their sizes never add up to more than `capacity`.

    A block that is being written or read stays, and so does one that a hold keeps; all others can be evicted.
    """

    def __init__(self, capacity: int, ttl_s: float | None = None, slots: bool = False):
        """capacity: largest sum of the blocks' sizes. ttl_s: seconds after which a block is dropped, however often it
        is used. slots: whether each block gets a number below `capacity`; every size must then be 1."""
        self.capacity, self.used = capacity, 0
        self.usage = NoUsage()
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._entries: OrderedDict[bytes, TierEntry] = OrderedDict()  # least recently used first
        self._ages: list[tuple[float, float, bytes]] = []  # heap of (when to look, time of `add`, name)
        self._free = list(range(capacity - 1, -1, -1)) if slots else None
        #: References of holds.
        self.held: Counter[bytes] = Counter()
        #: Whether a block was removed that a hold kept; the caller resets it.
        self.lost_held = False
        #: Names that were removed; the caller empties it.
        self.removed: list[bytes] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> list[bytes]:
        return list(self._entries)

    def has(self, name: bytes) -> bool:
        """Return whether a block can be read."""
        entry = self._entries.get(name)
        return entry is not None and entry.ready

    def knows(self, name: bytes) -> bool:
        """Return whether a block can be read, or is being written."""
        return name in self._entries

    def slot(self, name: bytes) -> int:
        return self._entries[name].slot

    def size(self, name: bytes) -> int:
        return self._entries[name].size

    def add(self, name: bytes, size: int, now: float) -> list[bytes] | None:
        """Reserve room for a block that is about to be written. Returns the names of the blocks evicted for it, or None
        if there is no room."""
        assert name not in self._entries
        evicted = self._make_room(size)
        if evicted is None:
            return None
        slot = -1 if self._free is None else self._free.pop()
        self._entries[name] = TierEntry(size, now, slot)
        if self._ttl_s < math.inf:
            heapq.heappush(self._ages, (now + self._ttl_s, now, name))
        self.used += size
        self.usage.added(name, size)
        return evicted

    def written(self, name: bytes) -> None:
        if entry := self._entries.get(name):
            entry.ready = True

    def begin_read(self, name: bytes) -> None:
        self._entries[name].readers += 1

    def end_read(self, name: bytes) -> None:
        if entry := self._entries.get(name):
            entry.readers -= 1

    def is_read(self, name: bytes) -> bool:
        return self._entries[name].readers > 0

    def touch(self, names: Iterable[bytes]) -> None:
        """Mark blocks as used. The last name is the most recently used."""
        for name in names:
            if name in self._entries:
                self._entries.move_to_end(name)

    def hold(self, name: bytes) -> None:
        """Keep a block from being evicted and from growing too old, until `unhold`."""
        self.held[name] += 1

    def unhold(self, name: bytes) -> None:
        """Undo `hold`, also for a block that was removed meanwhile."""
        if self.held[name] > 1:
            self.held[name] -= 1
        else:
            del self.held[name]

    def remove(self, name: bytes) -> bool:
        """Forget a block. Returns False if no block has this name."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        if self.held.pop(name, 0):
            self.lost_held = True
        self.removed.append(name)
        self.used -= entry.size
        self.usage.removed(name, entry.size)
        if self._free is not None:
            self._free.append(entry.slot)
        return True

    def drop(self, name: bytes) -> bool:
        """Forget a block that is not being written or read. Returns False if there is no such block."""
        return name in self._entries and self._idle(name) and self.remove(name)

    def expire(self, now: float) -> list[bytes]:
        """Forget the blocks that are too old, and return their names."""
        expired, busy = [], []
        while self._ages and self._ages[0][0] <= now:
            _, added_at, name = heapq.heappop(self._ages)
            entry = self._entries.get(name)
            if entry is None or entry.added_at != added_at:
                continue  # it was removed, and perhaps added again
            if self._idle(name):
                self.remove(name)
                expired.append(name)
            else:
                busy.append((now + BUSY_S, added_at, name))
        for each in busy:
            heapq.heappush(self._ages, each)
        return expired

    def clear(self) -> list[bytes]:
        """Forget all blocks that are not being written or read, and return their names."""
        idle = [name for name in self._entries if self._idle(name)]
        for name in idle:
            self.remove(name)
        return idle

    def _make_room(self, size: int) -> list[bytes] | None:
        evicted: list[bytes] = []
        missing = self.used + size - self.capacity
        for name, entry in self._entries.items() if missing > 0 else ():
            if missing <= 0:
                break
            if self._idle(name):
                evicted.append(name)
                missing -= entry.size
        if missing > 0:
            return None
        for name in evicted:
            self.remove(name)
        return evicted

    def _idle(self, name: bytes) -> bool:
        entry = self._entries[name]
        return entry.ready and not entry.readers and name not in self.held

    def check(self) -> None:
        """Raise AssertionError unless sizes and slots add up."""
        assert self.used == sum(entry.size for entry in self._entries.values()) <= self.capacity, "bytes are lost"
        if self._ttl_s < math.inf:
            ages = {(added_at, name) for _, added_at, name in self._ages}
            assert all((entry.added_at, name) in ages for name, entry in self._entries.items()), "a block has no end"
        assert self.held.keys() <= self._entries.keys(), "a held block is lost"
        assert all(entry.readers >= 0 for entry in self._entries.values()), "a block was read to its end twice"
        if self._free is not None:
            slots = [entry.slot for entry in self._entries.values()] + self._free
            assert sorted(slots) == list(range(self.capacity)), "a slot is lost"

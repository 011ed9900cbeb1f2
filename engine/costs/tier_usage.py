"""Divides the time for which a tier keeps blocks among those who hold them. Pure Python: no clock."""

from __future__ import annotations

from dataclasses import dataclass

from engine.costs.request_cost import BlockAccount
from engine.kv_offload.tier_index import NoUsage


@dataclass(slots=True)
class HeldBlock:
    """A block that somebody holds. As for a block of BlockUsage, each holder pays the difference of `per_reference`
    between the end and the start of its reference."""

    size: int
    """In units of the index; 0 once the tier has lost the block."""
    since: int
    references: int = 0
    per_reference: int = 0
    rest: int = 0


class TierUsage(NoUsage):
    """Bytes of one index of a tier times the nanoseconds for which it keeps them, divided exactly: at any time, each of
    n holders of a block pays for 1/n of it. Nobody pays for the other blocks, which are a cache."""

    def __init__(self, unit_bytes: int):
        """unit_bytes: bytes of one unit of size."""
        #: Now, in nanoseconds. The owner moves it; all changes until the next move happen at this time.
        self.now_ns = 0
        self._unit_bytes = unit_bytes
        self._held: dict[bytes, HeldBlock] = {}
        self._kept = self._kept_ns = 0  # size of all blocks; their size times time, less `_kept * now_ns`
        self._cached = self._cached_ns = 0  # the same for blocks that nobody holds

    # -- changes of the tier -------------------------------------------------------------------------------

    def added(self, name: bytes, size: int) -> None:
        self._keep(size)
        self._resize(name, size)

    def removed(self, name: bytes, size: int) -> None:
        self._keep(-size)
        self._resize(name, -size)

    def _resize(self, name: bytes, size: int) -> None:
        if (block := self._held.get(name)) is None:
            self._cache(size)
        else:
            self._divide(block)
            block.size += size

    # -- holders -------------------------------------------------------------------------------------------

    def taken(self, account: BlockAccount, name: bytes, size: int) -> None:
        """Record that a holder begins to hold a block of this size."""
        if (block := self._held.get(name)) is None:
            block = self._held[name] = HeldBlock(size, self.now_ns)
            self._cache(-size)
        self._divide(block)
        block.references += 1
        account.block_ns -= block.per_reference

    def returned(self, account: BlockAccount, name: bytes) -> None:
        """Record that a holder no longer holds a block, which the tier may have lost meanwhile."""
        block = self._held[name]
        self._divide(block)
        block.references -= 1
        account.block_ns += block.per_reference
        if not block.references:
            account.block_ns += block.rest
            self._cache(block.size)
            del self._held[name]

    def per_reference(self, name: bytes) -> int:
        """Return what one holder of a block that somebody holds would have paid since then, until now."""
        self._divide(block := self._held[name])
        return block.per_reference

    # -- totals --------------------------------------------------------------------------------------------

    @property
    def byte_ns(self) -> int:
        """Of all blocks until now."""
        return self._unit_bytes * (self._kept_ns + self._kept * self.now_ns)

    @property
    def cached_byte_ns(self) -> int:
        """Of blocks that nobody holds."""
        return self._unit_bytes * (self._cached_ns + self._cached * self.now_ns)

    @property
    def carried_byte_ns(self) -> int:
        """Fractions that are carried over until the last holder of a block pays them."""
        return sum(block.rest for block in self._held.values())

    # ------------------------------------------------------------------------------------------------------

    def _keep(self, size: int) -> None:
        self._kept += size
        self._kept_ns -= size * self.now_ns

    def _cache(self, size: int) -> None:
        self._cached += size
        self._cached_ns -= size * self.now_ns

    def _divide(self, block: HeldBlock) -> None:
        """Charge the holders of a block until now."""
        if block.references:
            elapsed = block.size * self._unit_bytes * (self.now_ns - block.since) + block.rest
            share, block.rest = divmod(elapsed, block.references)
            block.per_reference += share
        block.since = self.now_ns

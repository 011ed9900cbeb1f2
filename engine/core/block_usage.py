"""Divides the time for which KV blocks are used among those who hold them. Pure Python: no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class BlockAccount:
    """Block time of one holder of references."""

    block_ns: int = 0
    """Blocks times nanoseconds. While the holder has references, BlockUsage.of gives the value instead."""


@dataclass(frozen=True, slots=True)
class KVCost:
    """What the KV blocks of a request had cost when it was summed the last time."""

    byte_ns: float = 0.0
    """Bytes times nanoseconds."""
    num_bytes: float = 0.0
    """Bytes that it used then; of a shared block, its share."""
    at_ns: int = 0
    """When that was."""
    next_sum: int = 0
    """Number of its tokens from which on it is summed again."""


class BlockUsage:
    """Block time of one pool, divided exactly: at any time, a block with n references costs each of them 1/n.

    For each block, this records what one reference would have cost since the start. A holder pays the difference
    between the end and the start of its reference, so a step that changes no reference costs nothing. Fractions of a
    nanosecond are carried over, and the last reference takes what is left.
    """

    def __init__(self, num_blocks: int, now_ns: int = 0, num_used: int = 0):
        """num_used: blocks that have references already; what they had cost before is left out."""
        #: Now, in nanoseconds. The owner moves it; all changes until the next move happen at this time.
        self.now_ns = now_ns
        self._num_used, self._used_ns = num_used, -num_used * now_ns
        self._since = [now_ns] * num_blocks
        self._per_reference = [0] * num_blocks
        self._rest = [0] * num_blocks

    def divide(self, block: int, references: int) -> None:
        """Charge the holders of a block until now. Called before its number of references changes. references: their
        number so far."""
        if references:
            elapsed = self.now_ns - self._since[block] + self._rest[block]
            share, self._rest[block] = divmod(elapsed, references)
            self._per_reference[block] += share
        self._since[block] = self.now_ns

    def taken(self, account: BlockAccount, block: int, references: int) -> None:
        """Record that a holder takes a reference to a block that has been divided until now. references: how many there
        were."""
        account.block_ns -= self._per_reference[block]
        if not references:
            self._num_used += 1
            self._used_ns -= self.now_ns

    def returned(self, account: BlockAccount, block: int, references: int) -> None:
        """Record that a holder drops a reference to a block that has been divided until now. references: how many are
        left."""
        account.block_ns += self._per_reference[block]
        if not references:
            account.block_ns += self._rest[block]
            self._rest[block] = 0
            self._num_used -= 1
            self._used_ns += self.now_ns

    @property
    def used_ns(self) -> int:
        """Time until now for which blocks had references, over all blocks."""
        return self._used_ns + self._num_used * self.now_ns

    def settle(self, ref_counts: Sequence[int]) -> None:
        """Charge all holders until now."""
        for block, references in enumerate(ref_counts):
            if references:
                self.divide(block, references)

    def of(self, account: BlockAccount, held: Iterable[int]) -> int:
        """Return the block time of a holder, as far as it has been divided. held: the blocks to which it has
        references."""
        return account.block_ns + sum(self._per_reference[block] for block in held)

    @property
    def carried_ns(self) -> int:
        """The fractions that are carried over."""
        return sum(self._rest)

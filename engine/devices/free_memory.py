"""Memory of a device that can still be taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that can be taken. limit: what ends it, in words for messages."""

    size: int
    limit: str

    def __str__(self) -> str:
        return f"{max(0, self.size) / GIB:.2f} GiB are free ({self.limit})"

    def less(self, size: int) -> FreeMemory:
        """Return what is left beside `size` bytes; below 0 if these do not fit."""
        return replace(self, size=self.size - size)

    def shared_by(self, count: int) -> FreeMemory:
        """Return the part of one of `count` processes that share it."""
        return self if count == 1 else FreeMemory(self.size // count, f"{self.limit}, shared by {count} ranks")

"""The KV blocks of one engine that one router knows. Uses no clock and no socket."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from engine.wire.block_hash import BLOCK_HASH_BYTES

FOLD_AT = 2048  # changes


def block_keys(hashes: bytes) -> list[int]:
    """Return the first 64 bits of each block hash. If two hashes have the same key, an estimate is wrong, and nothing
    else."""
    words = array("Q")
    words.frombytes(hashes)
    return words[:: BLOCK_HASH_BYTES // words.itemsize].tolist()


class PrefixIndex:
    """Blocks that an engine reports, and blocks that it will have because a prompt was sent there.

    An engine never has a block without the previous block of the chain (`BlockPool` evicts a chain from its end), so a
    binary search finds how much of a prompt the engine has. If all layers of the engine's model have a window, the
    engine evicts the first blocks first. The index then searches for a window's blocks backwards from the end of the
    prompt.

    Memory: 8 bytes per reported block, and about 150 per block of a prompt that was sent. Both are bounded by the
    engine's own cache and queue, so nothing is ever dropped to save memory.
    """

    # slots save cache lines: a choice reads the indexes of all engines
    __slots__ = ("_expected", "_window_blocks", "stored")

    def __init__(self) -> None:
        self.stored = KeySet()  #: keys of all reported blocks
        self._expected: Counter[int] = Counter()
        self._window_blocks = 0

    def reset(self, keys: Sequence[int], window_blocks: int = 0) -> None:
        """Replace all reported blocks. window_blocks: see EngineUpdate."""
        self.stored, self._window_blocks = KeySet(keys), window_blocks

    def update(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        self.stored.update(stored, removed)

    def expect(self, keys: Sequence[int]) -> None:
        """Record that a prompt with these uncached blocks was sent to the engine."""
        self._expected.update(keys)

    def unexpect(self, keys: Sequence[int]) -> None:
        """Undo `expect`, because the prompt is computed or dropped and the engine's reports now say which blocks it
        has."""
        for key in keys:
            if self._expected[key] > 1:
                self._expected[key] -= 1
            else:
                del self._expected[key]

    def match(self, keys: Sequence[int], guess: int = 0) -> int:
        """Return how many leading blocks of a prompt the engine has or will have.

        guess: a result to try first, from 0 to the number of keys, since many engines have the same part of a prompt.
        """
        stored, expected = self.stored, self._expected
        if not keys:
            return 0
        if self._window_blocks:
            return self._match_window(keys, self.stored, self._expected)
        reaches = not guess or keys[guess - 1] in stored
        if reaches and (guess == len(keys) or (keys[guess] not in stored and keys[guess] not in expected)):
            return guess
        return bisect_left(keys, True, key=lambda key: key not in stored and key not in expected)

    def match_stored(self, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt the engine has now."""
        if self._window_blocks:
            return self._match_window(keys, self.stored)
        return bisect_left(keys, True, key=lambda key: key not in self.stored)

    def _match_window(self, keys: Sequence[int], *known: KeySet | Counter[int]) -> int:
        count = index = len(keys)
        while index > max(0, count - self._window_blocks):
            index -= 1
            if not any(keys[index] in some for some in known):
                count = index
        return count


class KeySet:
    """A large set of 64-bit keys in 8 bytes each: a sorted array, and the changes since it was built.

    A Python set would take ten times the memory; with ten million keys, every full garbage collection would take three
    seconds.
    """

    __slots__ = ("_changed", "_sorted")

    def __init__(self, keys: Sequence[int] = ()):
        self._sorted = _to_array(np.unique(np.array(keys, np.uint64)))
        self._changed: dict[int, bool] = {}  # by key: whether it is in the set now

    def __contains__(self, key: int) -> bool:
        there = self._changed.get(key)
        if there is not None:
            return there
        index = bisect_left(self._sorted, key)
        return index < len(self._sorted) and self._sorted[index] == key

    def update(self, added: Iterable[int], removed: Iterable[int]) -> None:
        self._changed.update(dict.fromkeys(removed, False))
        self._changed.update(dict.fromkeys(added, True))
        if len(self._changed) > FOLD_AT:
            self._fold()

    def to_set(self) -> set[int]:
        self._fold()
        return set(self._sorted)

    def _fold(self) -> None:
        """Merge the changes into the sorted array."""
        changed = np.sort(np.array(list(self._changed), np.uint64))
        added = np.sort(np.array([key for key, there in self._changed.items() if there], np.uint64))
        before = np.frombuffer(self._sorted, np.uint64) if self._sorted else np.empty(0, np.uint64)
        indices = np.searchsorted(before, changed)
        known = indices < len(before)
        known[known] = before[indices[known]] == changed[known]
        kept = np.delete(before, indices[known])
        self._sorted = _to_array(np.insert(kept, np.searchsorted(kept, added), added))
        self._changed = {}


def _to_array(keys: np.ndarray) -> array[int]:
    """Convert to Python's array, in which a binary search takes half the time it takes in numpy's."""
    found = array("Q")
    found.frombytes(keys.tobytes())
    return found

"""Which engine has the KV of which prompts, as far as one router knows. No clock, no socket."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from deployments.routing.key_set import KeySet
from engine.wire.block_hash import BLOCK_HASH_BYTES


def block_keys(names: bytes) -> list[int]:
    """The first 64 bits of each block's name. Two names with equal keys would make an estimate wrong, nothing else."""
    words = array("Q")
    words.frombytes(names)
    return words[:: BLOCK_HASH_BYTES // words.itemsize].tolist()


NOTHING = KeySet()


class PrefixIndex:
    """Blocks that engines have, by what they say, and blocks that they will have, since a prompt was sent there.

    An engine has no block without the one before it in the chain (`BlockPool` evicts a chain from its end), so a search
    by halves finds how much of a prompt is there, in a set of keys per engine.

    Memory: 8 bytes per block of each engine, and some 150 per block of a prompt on its way. So it is bounded by the
    engines' own caches and queues, and nothing has to be forgotten for want of room.
    """

    def __init__(self) -> None:
        self._stored: dict[str, KeySet] = {}
        self._coming: dict[str, Counter[int]] = {}
        self._prompts: dict[str, tuple[str, Sequence[int]]] = {}  # by request: where it was sent, its keys

    def reset(self, engine: str, keys: Sequence[int]) -> None:
        """These are all blocks that the engine has."""
        self._stored[engine] = KeySet(keys)

    def update(self, engine: str, stored: Sequence[int], removed: Sequence[int]) -> None:
        self._stored.setdefault(engine, KeySet()).update(stored, removed)

    def expect(self, request_id: str, engine: str, keys: Sequence[int]) -> None:
        """A prompt has been sent to the engine, which will have these blocks of it, beside those that it has; and to no
        other engine, for all we know."""
        self.resolve(request_id)
        self._prompts[request_id] = (engine, keys)
        self._coming.setdefault(engine, Counter()).update(keys)

    def resolve(self, request_id: str) -> None:
        """The prompt is computed, or never will be: what the engine says is all from now on."""
        engine, keys = self._prompts.pop(request_id, ("", ()))
        coming = self._coming.get(engine)
        if coming is None:
            return
        for key in keys:
            if coming[key] > 1:
                coming[key] -= 1
            else:
                del coming[key]

    def expected_at(self, request_id: str) -> str | None:
        """Where the prompt was sent, until it is settled."""
        prompt = self._prompts.get(request_id)
        return None if prompt is None else prompt[0]

    def forget(self, engine: str) -> None:
        self._stored.pop(engine, None)
        self._coming.pop(engine, None)
        self._prompts = {name: prompt for name, prompt in self._prompts.items() if prompt[0] != engine}

    def match(self, engine: str, keys: Sequence[int], guess: int = 0) -> int:
        """How many of the prompt's blocks, from the first on, are at the engine or will be.

        guess: looked at first, since many engines have the same part of a prompt. From 0 to the number of keys.
        """
        stored, coming = self._stored.get(engine, NOTHING), self._coming.get(engine, ())
        if not keys:
            return 0
        reaches = not guess or keys[guess - 1] in stored
        if reaches and (guess == len(keys) or (keys[guess] not in stored and keys[guess] not in coming)):
            return guess
        return bisect_left(keys, True, key=lambda key: key not in stored and key not in coming)

    def stored(self, engine: str) -> set[int]:
        """Keys of the blocks that the engine says it has."""
        return self._stored.get(engine, NOTHING).to_set()

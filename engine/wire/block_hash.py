"""Content hashes of KV blocks, the same in every engine and router."""

from __future__ import annotations

import hashlib
from array import array

BLOCK_HASH_BYTES = 16


def root_hash(keys: tuple[str, ...]) -> bytes:
    """Return the parent hash of a sequence's first block. Sequences share blocks only if all of these keys are equal:
    what decides, besides the tokens, what their KV is or who may see it (the cache salt, and an adapter's name)."""
    joined = b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in keys)
    return hashlib.blake2b(joined, digest_size=16, person=b"manta-kv-root").digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Hash everything that the KV of a block depends on: all tokens up to its end.

    128 bits of blake2b: a collision would show one user's text to another, so no cheaper hash will do.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def block_hashes(tokens: list[int], block_size: int, cache_salt: str = "") -> bytes:
    """Return the hashes of all full blocks of these tokens, joined; the same as those of `Request.hashes`."""
    content, last = array("i", tokens).tobytes(), root_hash((cache_salt,))
    size = block_size * array("i").itemsize
    hashes = []
    for start in range(0, len(content) - size + 1, size):
        last = hashlib.blake2b(last + content[start : start + size], digest_size=16).digest()
        hashes.append(last)
    return b"".join(hashes)

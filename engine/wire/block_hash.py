"""Hashes that name KV blocks by their content, the same in every engine and router."""

from __future__ import annotations

import hashlib
from array import array

BLOCK_HASH_BYTES = 16


def root_hash(keys: tuple[str, ...]) -> bytes:
    """Parent of a sequence's first block. Sequences share blocks only if all of these keys are equal: whatever beside
    the tokens decides what their KV is, or who may see it (the cache salt; a LoRA adapter's name would be another)."""
    joined = b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in keys)
    return hashlib.blake2b(joined, digest_size=16, person=b"manta-kv-root").digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Name of a block by everything that its KV depends on: all tokens up to its end.

    128 bits of blake2b: a collision would show one user's text to another, so no cheaper hash will do.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def block_hashes(tokens: list[int], block_size: int, cache_salt: str = "") -> bytes:
    """Names of all full blocks of these tokens, one after the other, as `Request.hashes` gives them."""
    content, name = array("i", tokens).tobytes(), root_hash((cache_salt,))
    size = block_size * array("i").itemsize
    names = []
    for start in range(0, len(content) - size + 1, size):
        name = hashlib.blake2b(name + content[start : start + size], digest_size=16).digest()
        names.append(name)
    return b"".join(names)

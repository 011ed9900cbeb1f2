"""Content hashes of KV blocks, the same in every engine and router."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_HASH_BYTES = 16
Place = tuple[int, int, bytes]
"""(offset, end, name) of tokens that stand for something that their ids do not tell, such as an image"""


def root_hash(cache_salt: str, extra_keys: tuple[str, ...] = ()) -> bytes:
    """Return the parent hash of a sequence's first block. Sequences share blocks only if salt and keys are equal.

    cache_salt: tells who may read the blocks. extra_keys: what determines the KV besides the tokens and their places.
    """
    keys = [key.encode() for key in (cache_salt, *extra_keys)]
    joined = b"".join(len(key).to_bytes(4, "little") + key for key in keys)
    return hashlib.blake2b(joined, digest_size=16, person=b"manta-kv-root").digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Return the hash of everything that a block's KV depends on: all tokens up to its end.

    Uses 128 bits of blake2b: a collision would show one user's text to another, which a cheaper hash would risk.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def with_places(parent: bytes, places: Sequence[Place], start: int, end: int) -> bytes:
    """Return the parent hash of the block with tokens [start, end): `parent` extended by the names and offsets of the
    block's places."""
    inside = [
        name + (offset - start).to_bytes(8, "little", signed=True)
        for offset, stop, name in places
        if offset < end and start < stop
    ]
    if not inside:
        return parent
    return hashlib.blake2b(parent + b"".join(inside), digest_size=16, person=b"manta-kv-image").digest()


def block_hashes(
    tokens: list[int],
    block_size: int,
    cache_salt: str = "",
    places: Sequence[Place] = (),
    extra_keys: tuple[str, ...] = (),
) -> bytes:
    """Return the concatenated hashes of all full blocks of these tokens, equal to those of `Request.hashes`."""
    content, last = array("i", tokens).tobytes(), root_hash(cache_salt, extra_keys)
    size = block_size * array("i").itemsize
    hashes = []
    for i, start in enumerate(range(0, len(content) - size + 1, size)):
        if places:
            last = with_places(last, places, i * block_size, (i + 1) * block_size)
        last = hashlib.blake2b(last + content[start : start + size], digest_size=16).digest()
        hashes.append(last)
    return b"".join(hashes)

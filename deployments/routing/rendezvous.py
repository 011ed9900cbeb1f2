"""Highest random weight hashing: Thaler and Ravishankar, A Name-Based Mapping Scheme for Rendezvous, 1996."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rendezvous_order(key: str, engines: Iterable[str]) -> list[str]:
    """The engines in an order that depends on the key, and on nothing else: equal in every process.

    When an engine goes, only the keys that it was first for move, evenly to all others; when one comes, it takes an
    even share of each.
    """
    seed = hashlib.blake2b(key.encode(), digest_size=16).digest()  # a key of blake2b must not be long
    return sorted(engines, key=lambda engine: (hashlib.blake2b(engine.encode(), key=seed).digest(), engine))

"""What replicas are asked about tapes."""

from __future__ import annotations

import msgspec

from deployments.replicas.pools import ReplicaQuestion

TIMEOUT_S = 30.0  # for a replica to answer


class TakeTapes(ReplicaQuestion, frozen=True):
    """Answered by PoolTapes: the tapes of the engines that record some, and of the replica's routers."""

    key: bytes
    """Of the hashes of blocks."""


class FirstTokensLate(ReplicaQuestion, frozen=True):
    """Tells replicas that first tokens begin to be late. It has no answer."""

    reason: str


class ListKeptTapes(ReplicaQuestion, frozen=True):
    """Answered by a list of KeptTape: the files on the replica's machine."""


class ReadKeptTape(ReplicaQuestion, frozen=True):
    """Answered by the content of a file of kept tapes; empty if there is none with this name."""

    name: str


class PoolTapes(msgspec.Struct, frozen=True):
    """Tapes of one model."""

    engines: list[bytes]
    """An EngineTape in msgpack each (engine/parts/tape/)."""
    routers: list[bytes]
    """A RouterTape in msgpack each (choice_record.py)."""


class KeptTape(msgspec.Struct, frozen=True):
    """A file in the folder of kept tapes of a replica's machine."""

    name: str
    size: int
    """In bytes."""
    written_at: float
    """Seconds since 1970."""
    own: bool
    """Whether it is of an engine of this server's deployments; else of another server or program of the same user."""

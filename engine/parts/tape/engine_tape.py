"""The tape of one engine, and how its hashes get a key."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from struct import Struct
from typing import Literal

import msgspec

from engine.parts.tape.object_graph import with_changed_hashes
from engine.wire.block_hash import BLOCK_HASH_BYTES

RECORD, DETAIL, PLANNED, COMMITTED, HASHES = range(5)
"""Kinds of entries. A RECORD is a time and an Input in msgpack, a DETAIL something about the entry before it. PLANNED
and COMMITTED are the two halves of a step, which come so often that they have a form of their own. HASHES are those of
a request's blocks."""
HEAD = Struct("<BI")  # kind, number of bytes that follow
AT = Struct("<d")  # time of a RECORD; then the record
PLAN = Struct("<BdI")  # kind, time, digest of the plan
COMMIT = Struct("<Bdd")  # kind, time, seconds of the step
SIZES = {PLANNED: PLAN.size, COMMITTED: COMMIT.size}  # of entries without a HEAD
REQUEST = Struct("<q")  # number of arrival; then the hashes

Cause = Literal["asked", "failed", "ended", "late"]
"""Why a tape was taken: somebody asked for it; the step loop failed; the engine or its replica hung or ended; first
tokens were late."""


class Segment(msgspec.Struct, array_like=True):
    """What has entered a scheduler from some moment on."""

    started_at: float
    """On the engine's clock."""
    state: bytes
    """State of the scheduler at that moment (snapshot.py)."""
    entries: bytes
    answers: bytes
    """What drafters, grammars and links have answered."""


class EngineTape(msgspec.Struct, kw_only=True):
    """The tape of one engine."""

    engine_id: str
    version: str
    """Version of Manta and of Python, and digest of the scheduler's source."""
    wall_s: float
    """Seconds since 1970 when the engine's clock was 0."""
    role: str
    segments: list[Segment]
    cause: Cause = "asked"
    reason: str = ""
    """The same in words, for a tape that was kept."""


def segment_with_key(segment: Segment, key: bytes) -> Segment:
    """Return a segment whose hashes have a key."""
    entries = bytearray(segment.entries)
    place = 0
    while place < len(entries):
        kind = entries[place]
        if size := SIZES.get(kind):
            place += size
        else:
            end = place + HEAD.size + HEAD.unpack_from(entries, place)[1]
            if kind == HASHES:
                start = place + HEAD.size + REQUEST.size
                entries[start:end] = hashes_with_key(bytes(entries[start:end]), key)
            place = end
    return Segment(
        segment.started_at,
        with_changed_hashes(segment.state, partial(hashes_with_key, key=key)),
        bytes(entries),
        bytes(segment.answers),
    )


def tape_with_key(tape: bytes, key: bytes) -> bytes:
    """Return a tape (an EngineTape in msgpack) whose hashes have a key. Tapes with the same key show which prompts of
    different engines begin alike, and nobody without the key can confirm what a prompt says."""
    found = msgspec.msgpack.decode(tape, type=EngineTape)
    segments = [segment_with_key(segment, key) for segment in found.segments]
    return msgspec.msgpack.encode(msgspec.structs.replace(found, segments=segments))


def hashes_with_key(hashes: bytes, key: bytes) -> bytes:
    """Replace each of some joined hashes by one with a key, so that nobody can confirm a guess."""
    size = BLOCK_HASH_BYTES
    parts = (hashes[i : i + size] for i in range(0, len(hashes), size))
    return b"".join(blake2b(part, digest_size=size, key=key).digest() for part in parts)

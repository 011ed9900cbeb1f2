"""The newest part of a tape, in a bounded number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, Literal

import msgspec

from engine.core.door.inputs import Input
from engine.parts.tape.answers import proposal
from engine.parts.tape.inputs import Detail
from engine.parts.tape.snapshot import hashes_with_key, with_key

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
SEGMENTS = 8  # in a full ring
ENCODE = msgspec.msgpack.Encoder().encode
SNAPSHOT_SHARE = 4  # a segment is this many times as long as the state at its beginning

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


class Ring:
    """The newest segments. Segments are dropped as a whole, the oldest first.

    Entries are `pending` until `settle` encodes them, so that a step only leaves references to what it has made.
    """

    def __init__(self, max_bytes: int, vocab_size: int = 0):
        """vocab_size: of the model, for what drafters propose."""
        self._vocab_size = vocab_size
        self.segments: deque[Segment] = deque()
        self.entries = self.answers = bytearray()  # of the newest segment
        #: Its further entries: each in bytes, or a function that returns the bytes, and arguments that never change.
        self.pending: list[bytes | tuple[Any, ...]] = []
        self.pending_answers: list[bytes | Sequence[int]] = []
        self.max_bytes, self._closed_bytes, self.limit = max_bytes, 0, 0

    def begin(self, state: bytes, now: float) -> None:
        """Begin a segment. `limit` is then the number of its bytes from which the next one is due."""
        self.settle()
        self._closed_bytes += len(self.entries) + len(self.answers)
        self.entries, self.answers = bytearray(), bytearray()
        self.segments.append(Segment(now, state, self.entries, self.answers))  # type: ignore[arg-type]  # they grow
        self._closed_bytes += len(state)
        self.limit = min(self.max_bytes // 2, max(self.max_bytes // SEGMENTS, SNAPSHOT_SHARE * len(state)))
        while len(self.segments) > 1 and self._closed_bytes + self.limit > self.max_bytes:
            oldest = self.segments.popleft()
            self._closed_bytes -= len(oldest.state) + len(oldest.entries) + len(oldest.answers)

    @property
    def is_due(self) -> bool:
        """Whether the newest segment is long enough for the next one to begin."""
        return len(self.entries) + len(self.answers) > self.limit

    def end(self) -> None:
        """Drop everything."""
        self.segments.clear()
        self.entries = self.answers = bytearray()
        self.pending.clear()
        self.pending_answers.clear()

    def settle(self) -> None:
        """Encode what is pending."""
        entries, answers = self.entries, self.answers
        for entry in self.pending:
            entries += entry if isinstance(entry, bytes) else entry[0](*entry[1:])
        for answer in self.pending_answers:
            answers += answer if isinstance(answer, bytes) else proposal(answer, self._vocab_size)
        self.pending.clear()
        self.pending_answers.clear()

    def record(self, given: Input, now: float) -> None:
        self.pending.append(record_entry(given, now))

    def detail(self, detail: Detail) -> None:
        self.pending.append(detail_entry(detail))

    def hashes(self, order: int, hashes: list[bytes]) -> None:
        """Record the hashes of a request's blocks."""
        self.pending.append(hashes_entry(order, hashes))


def record_entry(given: Input, now: float) -> bytes:
    data = ENCODE(given)
    return HEAD.pack(RECORD, AT.size + len(data)) + AT.pack(now) + data


def detail_entry(detail: Detail) -> bytes:
    data = ENCODE(detail)
    return HEAD.pack(DETAIL, len(data)) + data


def hashes_entry(order: int, hashes: list[bytes]) -> bytes:
    data = b"".join(hashes)
    return HEAD.pack(HASHES, REQUEST.size + len(data)) + REQUEST.pack(order) + data


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
    return Segment(segment.started_at, with_key(segment.state, key), bytes(entries), bytes(segment.answers))


def tape_with_key(tape: bytes, key: bytes) -> bytes:
    """Return a tape (an EngineTape in msgpack) whose hashes have a key. Tapes with the same key show which prompts of
    different engines begin alike, and nobody without the key can confirm what a prompt says."""
    found = msgspec.msgpack.decode(tape, type=EngineTape)
    segments = [segment_with_key(segment, key) for segment in found.segments]
    return msgspec.msgpack.encode(msgspec.structs.replace(found, segments=segments))

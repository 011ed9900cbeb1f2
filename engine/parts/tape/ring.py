"""The newest part of a tape, in a bounded number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.door.inputs import Input
from engine.parts.tape.answers import proposal
from engine.parts.tape.engine_tape import AT, DETAIL, HASHES, HEAD, RECORD, REQUEST, Segment
from engine.parts.tape.inputs import Detail

SEGMENTS = 8  # in a full ring
ENCODE = msgspec.msgpack.Encoder().encode
SNAPSHOT_SHARE = 4  # a segment is this many times as long as the state at its beginning


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

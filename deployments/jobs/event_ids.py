"""Event ids, which encode a client's position in a stream.

A job's stream has one token per group of events, so its events are a function of the tokens. When a stream is computed
again, the tokens of different choices can interleave differently. So a position holds, for each choice, the number of
its tokens and their checksum, and it says to which group its event belongs.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.jobs.errors import AnswerDiverged
from engine.errors import InvalidParameter
from engine.text.text_stream import TextChunk

MAX_CHOICES = 16
"""Limit for streams with ids, because an id contains the position of every choice."""
LAST_EVENT_ID = "Last-Event-ID"
MAX_ID = 1024
KNOWN_ID = "the id of an event of this stream"
_CHOICE = r"\d{1,9}-[0-9a-f]{8}e?"
_ID = re.compile(rf"([0-9a-f]{{32}}):(\d{{1,9}})\.(\d{{1,2}})\.(\d{{1,9}})\.({_CHOICE}(?:,{_CHOICE})*)")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    tokens: int = 0
    ended: bool = False
    checksum: int = 0
    """CRC-32 of the tokens."""

    def after(self, token_ids: list[int], ended: bool) -> ChoicePosition:
        checksum = zlib.crc32(array("I", token_ids).tobytes(), self.checksum)
        return ChoicePosition(self.tokens + len(token_ids), ended, checksum)

    def is_before(self, other: ChoicePosition) -> bool:
        return (self.tokens, self.ended) < (other.tokens, other.ended)

    def __str__(self) -> str:
        return f"{self.tokens}-{self.checksum:08x}{'e' if self.ended else ''}"

    @classmethod
    def parse(cls, text: str) -> ChoicePosition:
        tokens, _, checksum = text.partition("-")
        return cls(int(tokens), len(checksum) > 8, int(checksum[:8], 16))

    @property
    def is_possible(self) -> bool:
        """Whether any sequence of tokens leads to this position."""
        return self.tokens > 0 or self.checksum == 0


@dataclass(frozen=True, slots=True)
class Position:
    """Position of an event in its stream."""

    number: int
    """Number of events before it."""
    choice: int
    """Index of the choice whose token, or end, its group of events was made of."""
    in_group: int
    """Number of events in its group, up to and including this one."""
    choices: tuple[ChoicePosition, ...]
    """Position in each choice after the group."""

    @property
    def is_first(self) -> bool:
        """Whether the event precedes the first token."""
        return not any(choice.tokens or choice.ended for choice in self.choices)

    def __str__(self) -> str:
        return f"{self.number}.{self.choice}.{self.in_group}.{','.join(map(str, self.choices))}"


def parse_event_id(event_id: str) -> tuple[str, Position]:
    """Return the stream's id and the position in it. Raises InvalidParameter."""
    match = _ID.fullmatch(event_id) if len(event_id) <= MAX_ID else None
    if match is not None:
        number, choice, in_group = map(int, match.groups()[1:4])
        choices = tuple(map(ChoicePosition.parse, match[5].split(",")))
        if choice < len(choices) <= MAX_CHOICES and all(each.is_possible for each in choices):
            return match[1], Position(number, choice, in_group, choices)
    raise InvalidParameter(LAST_EVENT_ID, event_id, KNOWN_ID)


class NoEventIds:
    """Stands in for EventIds in a stream whose events have no ids, so that its client cannot resume."""

    error: Exception | None = None
    """Error that ended the stream, if any."""

    def ordered(self, chunk: TextChunk) -> Iterator[TextChunk]:
        yield chunk

    def fail(self, error: Exception) -> None: ...

    def next(self, event: object = None) -> bytes | None:
        return b""


class EventIds(NoEventIds):
    """Assigns ids to the events of one client's stream, and recognises events that the client already has."""

    def __init__(self, stream_id: str, num_choices: int, known: Position | None):
        """known: position of the newest event that the client has. Raises InvalidParameter if it is of another
        stream."""
        if known is not None and len(known.choices) != num_choices:
            raise InvalidParameter(LAST_EVENT_ID, f"{stream_id}:{known}", KNOWN_ID)
        self._stream_id, self._known = stream_id, known
        self._number = 0 if known is None else known.number + 1  # number of the next event that the client gets
        self._come = [ChoicePosition()] * num_choices  # tokens received for each choice
        self._sent = self._come.copy() if known is None else [*known.choices]  # tokens that the client has
        self._group, self._in_group = (0, ChoicePosition()), 0  # of the next event
        self._catches_up = known is not None and not known.is_first
        self._last: TextChunk | None = None  # chunk of whose events the client may lack some
        self._new: list[TextChunk] = []  # chunks new to the client, held back while it catches up

    def ordered(self, chunk: TextChunk) -> Iterator[TextChunk]:
        """Yield chunks, each one token or an end; chunks that the client already has come first. The client may lack
        some events of the last of these chunks. The caller makes the next events from the yielded chunk.

        Raises AnswerDiverged if the client has other tokens.
        """
        self._come[chunk.index] = now = self._after(self._come, chunk)
        if not self._catches_up:
            yield self._begin(chunk)
            return
        assert self._known is not None
        target = self._known.choices[chunk.index]
        self._check(now, target, chunk.index)
        if target.is_before(now):
            self._new.append(chunk)
        elif chunk.index == self._known.choice and now == target:
            self._last = chunk
        else:
            self._group = chunk.index, now
            yield chunk
        if any(come.is_before(then) for come, then in zip(self._come, self._known.choices, strict=True)):
            return
        if self._last is None:
            raise AnswerDiverged(self._known.choice, self._known.choices[self._known.choice].tokens)
        self._group, self._in_group = (self._known.choice, self._known.choices[self._known.choice]), 0
        yield self._last
        self._catches_up = False
        for new in self._new:
            yield self._begin(new)

    def _begin(self, chunk: TextChunk) -> TextChunk:
        index = chunk.index
        self._sent[index] = self._after(self._sent, chunk)
        self._group, self._in_group = (index, self._sent[index]), 0
        return chunk

    def _after(self, choices: list[ChoicePosition], chunk: TextChunk) -> ChoicePosition:
        return choices[chunk.index].after(chunk.token_ids, chunk.finish_reason is not None)

    def _check(self, now: ChoicePosition, target: ChoicePosition, index: int) -> None:
        if (
            (now.tokens == target.tokens and now.checksum != target.checksum)
            or (now.tokens < target.tokens and now.ended)
            or (now.tokens > target.tokens and target.ended)
        ):
            raise AnswerDiverged(index, target.tokens)

    def fail(self, error: Exception) -> None:
        """Record the error that ends the stream. Its event has no id, so the stream can be resumed from the position
        before it."""
        self.error = error

    def next(self, event: object = None) -> bytes | None:
        """Return the line with the id of the next event, or None if the client already has the event. If the event has
        a `sequence_number`, set it to the event's number in this client's stream."""
        self._in_group += 1
        if self.error is not None:
            return b""
        known = self._known
        if known is not None:
            at_last = self._group == (known.choice, known.choices[known.choice])
            if (self._catches_up and not at_last) or (at_last and self._in_group <= known.in_group):
                return None
        if hasattr(event, "sequence_number"):
            event.sequence_number = self._number
        position = Position(self._number, self._group[0], self._in_group, tuple(self._sent))
        self._number += 1
        return f"id: {self._stream_id}:{position}\n".encode()

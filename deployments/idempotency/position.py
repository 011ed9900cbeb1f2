"""How far a client is in a stream, as the ids of its events say.

A stream can be computed again, but its tokens may then come in other groups, and events are made of groups. So a
position counts tokens, has a check sum of them, and says which group of tokens its event was made of.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from deployments.frontend.token_channel import joined
from deployments.idempotency.errors import AnswerDiverged
from engine.errors import InvalidParameter
from engine.text.text_stream import TextChunk
from engine.wire.messages import TokenDelta

MAX_CHOICES = 16
"""Streams of more have no ids, since an id has a place for each."""
LAST_EVENT_ID = "Last-Event-ID"
MAX_ID = 1024
KNOWN_ID = "the id of an event of this stream"
_CHOICE = r"\d{1,9}-[0-9a-f]{8}e?"
_ID = re.compile(rf"([0-9a-f]{{32}}):(\d{{1,9}})\.(\d{{1,9}})\.(\d{{1,2}})\.(\d{{1,9}})\.({_CHOICE}(?:,{_CHOICE})*)")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """What a client has of one choice."""

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


@dataclass(frozen=True, slots=True)
class Position:
    """Where an event stands in its stream."""

    number: int
    """Events before it."""
    in_group: int
    """Events of its group, up to this one."""
    choice: int
    """Whose tokens the group has."""
    group_size: int
    """Tokens of the group; 0 before the first, and if only the end came."""
    choices: tuple[ChoicePosition, ...]
    """The position of each choice after the group."""

    @property
    def is_first(self) -> bool:
        """Whether the event came before the first token."""
        return not any(choice.tokens or choice.ended for choice in self.choices)

    def __str__(self) -> str:
        choices = ",".join(map(str, self.choices))
        return f"{self.number}.{self.in_group}.{self.choice}.{self.group_size}.{choices}"


def parse_event_id(event_id: str) -> tuple[str, Position]:
    """Return the id of the stream and the position in it. Raises InvalidParameter."""
    match = _ID.fullmatch(event_id) if len(event_id) <= MAX_ID else None
    if match is not None:
        number, in_group, choice, size = map(int, match.groups()[1:5])
        choices = tuple(map(ChoicePosition.parse, match[6].split(",")))
        if choice < len(choices) <= MAX_CHOICES and size <= choices[choice].tokens:
            return match[1], Position(number, in_group, choice, size, choices)
    raise InvalidParameter(LAST_EVENT_ID, event_id, KNOWN_ID)


class EventIds:
    """Gives ids to the events of a stream, one client's, and says which of them the client already has."""

    def __init__(self, stream_id: str, num_choices: int, known: Position | None):
        """known: of the newest event that the client has. Raises InvalidParameter if it is of another stream."""
        if known is not None and len(known.choices) != num_choices:
            raise InvalidParameter(LAST_EVENT_ID, f"{stream_id}:{known}", KNOWN_ID)
        self.number = 0 if known is None else known.number + 1  #: of the next event that the client gets
        self._stream_id, self._known = stream_id, known
        self._choices = [ChoicePosition()] * num_choices
        self._choice = self._group_size = self._in_group = 0
        # deltas of what the client does not know, as long as something comes that it knows
        self._held: list[tuple[int, TokenDelta]] | None = None if known is None or known.is_first else []
        self._at_known_group = known is not None and known.is_first
        self._group_follows = self._failed = False

    def regroup(self, choice: int, delta: TokenDelta) -> Iterator[tuple[int, TokenDelta]]:
        """Yield deltas by choice, cut, joined and ordered so that what the client knows comes first, and last of that
        the group whose events it may not have all of."""
        known = self._known
        if known is None or self._held is None:
            yield choice, delta
            return
        target = known.choices[choice]
        begin = target.tokens - known.group_size if choice == known.choice else target.tokens
        for part in _cut(delta, begin, with_end=choice != known.choice and target.ended):
            if part.position < begin or (choice != known.choice and self._choices[choice].is_before(target)):
                yield choice, part
            else:
                self._held.append((choice, part))
        if any(now.is_before(then) for now, then in self._others()):
            return
        parts = [part for held_choice, part in self._held if held_choice == known.choice]
        group = joined(parts) if parts else None
        last = known.choices[known.choice]
        if group is None or (group.finish_reason is None and _end(group) < last.tokens + last.ended):
            return  # an end that the client saw with the last token may come apart from it this time
        others, self._held = [held for held in self._held if held[0] != known.choice], None
        for i, part in enumerate(_cut(group, last.tokens, with_end=last.ended)):
            self._group_follows = i == 0
            yield known.choice, part
        yield from others

    def advance(self, chunk: TextChunk) -> None:
        """The next events are made of this group. Raises AnswerDiverged if the client has other tokens."""
        index, begin = chunk.index, self._choices[chunk.index].tokens
        now = self._choices[index] = self._choices[index].after(chunk.token_ids, chunk.finish_reason is not None)
        self._choice, self._group_size, self._in_group = index, len(chunk.token_ids), 0
        self._at_known_group, self._group_follows = self._group_follows, False
        if self._known is None:
            return
        target = self._known.choices[index]
        if (
            (now.tokens == target.tokens and now.checksum != target.checksum)
            or (now.tokens < target.tokens and now.ended)
            or (now.tokens > target.tokens and (begin < target.tokens or target.ended))
        ):
            raise AnswerDiverged(index, target.tokens)

    def fail(self) -> None:
        """What follows is an error. It has no id: the stream can be gone on with from where it was before."""
        self._failed = True

    def next(self) -> bytes | None:
        """Return the line with the id of the next event, or None if the client has the event."""
        self._in_group += 1
        if self._failed:
            return b""
        if self._known is not None and (
            self._held is not None or (self._at_known_group and self._in_group <= self._known.in_group)
        ):
            return None
        position = Position(self.number, self._in_group, self._choice, self._group_size, tuple(self._choices))
        self.number += 1
        return f"id: {self._stream_id}:{position}\n".encode()

    def _others(self) -> Iterator[tuple[ChoicePosition, ChoicePosition]]:
        """Yield where the choices are that have no part in the group which the client knows, and where they were."""
        assert self._known is not None
        for i, (now, then) in enumerate(zip(self._choices, self._known.choices, strict=True)):
            if i != self._known.choice:
                yield now, then


def _end(delta: TokenDelta) -> int:
    return delta.position + len(delta.token_ids)


def _cut(delta: TokenDelta, at: int, *, with_end: bool) -> Iterator[TokenDelta]:
    """Yield what a delta has before the position `at`, and the rest. with_end: the end of the sequence, if it comes
    with the last token before `at`, stays there."""
    size = at - delta.position
    if not 0 < size <= len(delta.token_ids) or (
        size == len(delta.token_ids) and (with_end or delta.finish_reason is None)
    ):
        yield delta
        return
    first, rest = (None, None) if delta.logprobs is None else (delta.logprobs[:size], delta.logprobs[size:])
    first_predicted = last_predicted = None
    if delta.prediction_tokens is not None:
        accepted, rejected = delta.prediction_tokens
        first_predicted, last_predicted = (min(accepted, size), 0), (max(0, accepted - size), rejected)
    yield msgspec.structs.replace(
        delta,
        token_ids=delta.token_ids[:size],
        logprobs=first,
        prediction_tokens=first_predicted,
        finish_reason=None,
        stop_reason=None,
        text_complete=False,
    )
    yield msgspec.structs.replace(
        delta,
        position=at,
        token_ids=delta.token_ids[size:],
        logprobs=rest,
        prompt_logprobs=None,
        num_cached_tokens=0,
        prediction_tokens=last_predicted,
    )

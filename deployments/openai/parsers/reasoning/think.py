"""Reasoning that a model writes before its answer, between tags: `<think>...</think>`."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from deployments.openai.parsers.output_parser import (
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
    State,
)
from deployments.openai.parsers.tools.call_reader import MAX_HEAD
from deployments.openai.parsers.tools.marked_calls import CallMarkup, MarkedCallsParser, ToolSchemas
from engine.text.detokenizer import start_of_possible

MAX_SPACE = 64  # characters of white space before the reasoning


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    around_content: tuple[str, ...] = ()
    """Tags around the text after the reasoning, which are dropped."""

    @property
    def markers(self) -> list[str]:
        return [*self.opens, *self.closes, *self.around_content]


@dataclass(frozen=True, slots=True)
class CallsInReasoning:
    """Calls with which a model may end its reasoning instead of the closing tag. Only one of a function that was
    offered ends it, since reasoning may mention the markers of calls."""

    markup: CallMarkup
    tools: ToolSchemas


class ThinkParser(OutputParser):
    """Parses text up to a closing tag as reasoning, if it begins with an opening tag or the prompt ended with one.

    Line breaks around both tags are dropped, because templates write them anyway and would otherwise write them twice.
    """

    def __init__(self, tags: ReasoningTags, *, opened: bool, calls: CallsInReasoning | None = None):
        """opened: whether the prompt ends inside the reasoning."""
        super().__init__()
        self._tags, self._calls, self._opened = tags, calls, opened
        self._openers = () if calls is None else tuple(filter(None, (*calls.markup.opens, calls.markup.call)))
        self._call_parser: MarkedCallsParser
        self._num_read = 0  # characters of the buffer that the parser of a call has read
        self._is_finished = False  # whether that parser knows that no text follows
        self._after_call = ""  # content after a call that ended the reasoning, which may begin a closing tag
        self._after_tag = False  # whether line breaks that follow belong to such a tag
        self._consumed = 0  # number of characters before the buffer
        self._start_offset: float = math.inf  # start of the reasoning, in characters
        self._end_offset: float = math.inf
        self._token_offsets: list[int] = []

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        events = super().finish(cut=cut)
        self._end_offset = min(self._end_offset, self._consumed + len(self._buffer))
        return events

    def count_tokens(self, offsets: list[int]) -> None:
        """Record the tokens of a chunk, before `add` gets its text. offsets: as in TextChunk."""
        if self._end_offset == math.inf:
            self._token_offsets += offsets

    @property
    def num_tokens(self) -> int:
        """Number of reasoning tokens, without tags."""
        return bisect_left(self._token_offsets, self._end_offset) - bisect_left(self._token_offsets, self._start_offset)

    def _consume(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._consumed += length
        return text

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        space = len(self._buffer) - len(rest)
        opening = next((tag for tag in self._tags.opens if rest.startswith(tag)), "")
        possible = space <= MAX_SPACE and any(tag.startswith(rest) for tag in self._tags.opens)
        if possible and not opening and not final:
            return None
        if opening and space <= MAX_SPACE:
            self._consume(space + len(opening))
        elif not self._opened:
            self._start_offset = self._end_offset = 0
            return self._first_content
        self._start_offset = self._consumed
        return self._first_reasoning

    def _first_reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._reasoning if self._buffer else None

    def _reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        ends = [*self._tags.closes, *self._openers]
        found = [(end, marker) for marker in ends if (end := self._buffer.find(marker)) >= 0]
        if not found:
            possible = len(self._buffer) if final else start_of_possible(ends, self._buffer)
            self._emit(out, self._consume(len(self._without_line_breaks(self._buffer[:possible]))))
            return None
        end, marker = min(found)
        self._emit(out, self._consume(len(self._without_line_breaks(self._buffer[:end]))))
        line_breaks = len(self._buffer) - len(self._buffer.lstrip("\n"))
        if marker in self._tags.closes:
            self._end_offset = self._consumed + line_breaks
            self._consume(line_breaks + len(marker))
            return self._after_reasoning
        assert self._calls is not None
        self._call_parser = MarkedCallsParser(self._calls.markup, self._calls.tools)
        self._num_read, self._is_finished = line_breaks, False
        return self._possible_call

    def _possible_call(self, out: list[OutputEvent], final: bool) -> State | None:
        """Decide whether the marker in front ends the reasoning. A call does so once its name is certain."""
        events = self._read_call(MAX_HEAD, final)
        if not events and not final:
            return None
        assert self._calls is not None
        if events and isinstance(events[0], CallStart) and events[0].name in self._calls.tools:
            self._end_offset = self._consumed + len(self._buffer) - len(self._buffer.lstrip("\n"))
            self._pass(out, events)
            self._consume(self._num_read)
            return self._in_calls
        line_breaks = len(self._buffer) - len(self._buffer.lstrip("\n"))
        marker = next(marker for marker in self._openers if self._buffer.startswith(marker, line_breaks))
        # what is longer than the beginning of a call is not searched for another one; however it was cut into chunks
        searched = (self._num_read - line_breaks - 1) // MAX_HEAD * MAX_HEAD
        self._emit(out, self._consume(line_breaks + (searched if searched > MAX_HEAD else len(marker))))
        return self._reasoning

    def _read_call(self, size: int, final: bool) -> list[OutputEvent]:
        """Let the parser of calls read the buffer in pieces of this size, until it finds something."""
        events: list[OutputEvent] = []
        while not events and self._num_read < len(self._buffer):
            piece = self._buffer[self._num_read : self._num_read + size]
            self._num_read += len(piece)
            events = self._call_parser.add(piece)
        if final and not events and not self._is_finished:
            self._is_finished = True
            events = self._call_parser.finish(cut=self._cut)
        return events

    def _in_calls(self, out: list[OutputEvent], final: bool) -> State | None:
        self._num_read = 0
        events = self._read_call(max(1, len(self._buffer)), final)
        self._pass(out, events)
        self._consume(self._num_read)
        if events:
            return self._in_calls
        if final:
            self._emit_content(out, len(self._after_call))
        return None

    def _pass(self, out: list[OutputEvent], events: list[OutputEvent]) -> None:
        """Pass the events on, without a closing tag that comes after the call."""
        for event in events:
            if not isinstance(event, Content):
                self._emit_content(out, len(self._after_call))
                out.append(event)
                continue
            self._after_call += event.text
            if self._after_tag:
                self._after_call = self._after_call.lstrip("\n")
                self._after_tag = not self._after_call
            found = [(end, tag) for tag in self._tags.closes if (end := self._after_call.find(tag)) >= 0]
            if found:
                end, tag = min(found)
                self._emit_content(out, len(self._without_line_breaks(self._after_call[:end])))
                self._after_call = self._after_call.lstrip("\n")[len(tag) :].lstrip("\n")
                self._after_tag = not self._after_call
            ready = self._after_call[: start_of_possible(self._tags.closes, self._after_call)]
            self._emit_content(out, len(self._without_line_breaks(ready)))

    def _emit_content(self, out: list[OutputEvent], length: int) -> None:
        text, self._after_call = self._after_call[:length], self._after_call[length:]
        if text:
            out.append(Content(text))

    @staticmethod
    def _without_line_breaks(text: str) -> str:
        return text[: max(len(text.rstrip("\n")), len(text) - MAX_SPACE)]

    def _after_reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._first_content if self._buffer else None

    def _first_content(self, out: list[OutputEvent], final: bool) -> State | None:
        rest, around = self._buffer.lstrip(), self._tags.around_content
        if around and rest.startswith(around[0]):
            self._consume(len(self._buffer) - len(rest) + len(around[0]))
            return self._before_content_in_tags
        waits = bool(around) and around[0].startswith(rest) and len(self._buffer) - len(rest) <= MAX_SPACE
        return None if (waits or not self._buffer) and not final else self._content

    def _before_content_in_tags(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._content_in_tags if self._buffer else None

    def _content_in_tags(self, out: list[OutputEvent], final: bool) -> State | None:
        close = self._tags.around_content[1]
        end = self._buffer.find(close)
        ready = end if end >= 0 else start_of_possible([close], self._buffer)
        text = self._consume(len(self._without_line_breaks(self._buffer[:ready])))
        if text:
            out.append(Content(text))
        if end >= 0:
            self._consume(self._buffer.index(close) + len(close))
            return self._content
        return self._content if final else None

    def _content(self, out: list[OutputEvent], final: bool) -> State | None:
        if self._buffer:
            out.append(Content(self._consume(len(self._buffer))))
        return None

    def _skip_line_breaks(self) -> None:
        self._consume(len(self._buffer) - len(self._buffer.lstrip("\n")))

    @staticmethod
    def _emit(out: list[OutputEvent], text: str) -> None:
        if text:
            out.append(Reasoning(text))

"""Reasoning that a model writes before its answer, between tags: `<think>...</think>`."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from deployments.openai.parsers.output_parser import Content, OutputEvent, OutputParser, Reasoning, State
from engine.text.detokenizer import start_of_possible

MAX_SPACE = 64  # characters of white space before the reasoning


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)

    @property
    def markers(self) -> list[str]:
        return [*self.opens, *self.closes]


class ThinkParser(OutputParser):
    """Parses text up to a closing tag as reasoning, if it begins with an opening tag or the prompt ended with one.

    Line breaks around both tags are dropped, because templates write them anyway and would otherwise write them twice.
    """

    def __init__(self, tags: ReasoningTags, *, opened: bool, calls: tuple[str, ...] = ()):
        """opened: whether the prompt ends inside the reasoning. calls: markers of tool calls, which also end
        reasoning."""
        super().__init__()
        self._tags = tags
        self._ends = [*tags.closes, *calls]
        self._opened = opened
        self._consumed = 0  # number of characters before the buffer
        self._start_offset: float = math.inf  # start of the reasoning, in characters
        self._end_offset: float = math.inf
        self._token_offsets: list[int] = []

    def finish(self) -> list[OutputEvent]:
        events = super().finish()
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
            return self._content
        self._start_offset = self._consumed
        return self._first_reasoning

    def _first_reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._reasoning if self._buffer else None

    def _reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        found = [(end, marker) for marker in self._ends if (end := self._buffer.find(marker)) >= 0]
        if found:
            end, marker = min(found)
            self._end_offset = self._consumed + end
            self._emit(out, self._without_line_breaks(self._consume(end)))
            self._consume(len(marker) if marker in self._tags.closes else 0)
            return self._first_content
        possible = len(self._buffer) if final else start_of_possible(self._ends, self._buffer)
        self._emit(out, self._consume(len(self._without_line_breaks(self._buffer[:possible]))))
        return None

    @staticmethod
    def _without_line_breaks(text: str) -> str:
        return text[: max(len(text.rstrip("\n")), len(text) - MAX_SPACE)]

    def _first_content(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._content if self._buffer else None

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

"""Reasoning that a model like DeepSeek-R1 or Qwen 3 writes before its answer: `<think>...</think>`."""

from __future__ import annotations

import math
from bisect import bisect_left

from deployments.openai.parsers.output_parser import Content, OutputEvent, OutputParser, Reasoning, State
from engine.text.detokenizer import start_of_possible

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(OutputParser):
    """Text up to `</think>` is reasoning if it begins with `<think>`, or if the prompt ended with it.

    Line breaks around both tags are dropped: templates write them, and would add them once more.
    """

    def __init__(self, *, opened: bool):
        """opened: the prompt ends inside the reasoning."""
        super().__init__()
        self._opened = opened
        self._consumed = 0  # characters before those in the buffer
        self._start_offset: float = math.inf  # where the reasoning starts, in characters
        self._end_offset: float = math.inf
        self._token_offsets: list[int] = []

    def finish(self) -> list[OutputEvent]:
        events = super().finish()
        self._end_offset = min(self._end_offset, self._consumed + len(self._buffer))
        return events

    def count_tokens(self, offsets: list[int]) -> None:
        """Note the tokens of a chunk, before `add` gets its text. offsets: see TextChunk."""
        if self._end_offset == math.inf:
            self._token_offsets += offsets

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning, without the tags."""
        return bisect_left(self._token_offsets, self._end_offset) - bisect_left(self._token_offsets, self._start_offset)

    def _consume(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._consumed += length
        return text

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if OPEN.startswith(rest) and rest != OPEN and not final:
            return None
        if rest.startswith(OPEN):
            self._consume(len(self._buffer) - len(rest) + len(OPEN))
        elif not self._opened:
            self._start_offset = self._end_offset = 0
            return self._content
        self._start_offset = self._consumed
        return self._first_reasoning

    def _first_reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._reasoning if self._buffer else None

    def _reasoning(self, out: list[OutputEvent], final: bool) -> State | None:
        end = self._buffer.find(CLOSE)
        if end >= 0:
            self._end_offset = self._consumed + end
            self._emit(out, self._consume(end).rstrip("\n"))
            self._consume(len(CLOSE))
            return self._first_content
        possible = len(self._buffer) if final else start_of_possible([CLOSE], self._buffer)
        self._emit(out, self._consume(len(self._buffer[:possible].rstrip("\n"))))
        return None

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

"""Reasoning that a model writes before its answer: `<think>...</think>`, as DeepSeek-R1 and Qwen 3 do."""

from __future__ import annotations

import math
from bisect import bisect_left

from deployments.openai.parsers.output_parser import BufferedParser, Content, Piece, Reasoning, State
from engine.text.detokenizer import start_of_possible

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(BufferedParser):
    """Text up to `</think>` is reasoning if it begins with `<think>`, or if the prompt ended with it.

    Line breaks around both are not part of either text: templates write them, and would add them once more.
    """

    def __init__(self, *, opened: bool):
        """opened: the prompt ends inside of the reasoning."""
        super().__init__()
        self._opened = opened
        self._taken = 0  # characters before those in the buffer
        self._from: float = math.inf  # of the reasoning, in characters
        self._to: float = math.inf
        self._offsets: list[int] = []

    def finish(self) -> list[Piece]:
        pieces = super().finish()
        self._to = min(self._to, self._taken + len(self._buffer))
        return pieces

    def count(self, offsets: list[int]) -> None:
        """To be told of each chunk before its text. offsets: characters before each of its tokens; see TextChunk."""
        if self._to == math.inf:
            self._offsets += offsets

    @property
    def num_tokens(self) -> int:
        """Of the reasoning, without the tags."""
        return bisect_left(self._offsets, self._to) - bisect_left(self._offsets, self._from)

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken += length
        return text

    def _start(self, out: list[Piece], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if OPEN.startswith(rest) and rest != OPEN and not final:
            return None
        if rest.startswith(OPEN):
            self._take(len(self._buffer) - len(rest) + len(OPEN))
        elif not self._opened:
            self._from = self._to = 0
            return self._answer
        self._from = self._taken
        return self._first_reasoning

    def _first_reasoning(self, out: list[Piece], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._reasoning if self._buffer else None

    def _reasoning(self, out: list[Piece], final: bool) -> State | None:
        end = self._buffer.find(CLOSE)
        if end >= 0:
            self._to = self._taken + end
            self._emit(out, self._take(end).rstrip("\n"))
            self._take(len(CLOSE))
            return self._first_answer
        possible = len(self._buffer) if final else start_of_possible([CLOSE], self._buffer)
        self._emit(out, self._take(len(self._buffer[:possible].rstrip("\n"))))
        return None

    def _first_answer(self, out: list[Piece], final: bool) -> State | None:
        self._skip_line_breaks()
        return self._answer if self._buffer else None

    def _answer(self, out: list[Piece], final: bool) -> State | None:
        if self._buffer:
            out.append(Content(self._take(len(self._buffer))))
        return None

    def _skip_line_breaks(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip("\n")))

    @staticmethod
    def _emit(out: list[Piece], text: str) -> None:
        if text:
            out.append(Reasoning(text))

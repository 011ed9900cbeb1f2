"""Tool calls that are the whole answer: JSON objects one after the other, or a JSON array of them."""

from __future__ import annotations

import string
from collections.abc import Container

from deployments.openai.parsers.call_reader import CallReader
from deployments.openai.parsers.output_parser import BufferedParser, Content, Piece, State

_BEFORE = string.whitespace + "["
_BETWEEN = string.whitespace + ",;]"  # Llama 3 separates calls by semicolons


class JsonCallsParser(BufferedParser):
    """An answer that does not begin with a call of one of the functions `names` is content.

    Nothing else tells a call from an answer in JSON, so the name has to be known.
    """

    def __init__(self, names: Container[str], *, early: bool):
        super().__init__()
        self._names, self._early = names, early
        self._skipped = ""  # before the call that is being read
        self._called = False
        self._call = CallReader(names, early=early)

    def _start(self, out: list[Piece], final: bool) -> State | None:
        rest = self._buffer.lstrip(_BETWEEN if self._called else _BEFORE)
        if rest.startswith("{"):
            self._skipped, self._buffer = self._buffer[: -len(rest)], rest
            self._call = CallReader(self._names, early=self._early)
            return self._in_call
        if rest or (final and not self._called):
            return self._content
        return None

    def _in_call(self, out: list[Piece], final: bool) -> State | None:
        pieces, self._buffer = self._call.add(self._buffer, final)
        out += pieces
        if not self._call.ended:
            return None
        if self._call.failed:
            out.append(Content(self._skipped + self._call.raw))
            return self._content
        self._called = True
        return self._start

    def _content(self, out: list[Piece], final: bool) -> State | None:
        if self._buffer:
            out.append(Content(self._buffer))
            self._buffer = ""
        return None

"""Tool calls that are the whole answer: JSON objects one after the other, or a JSON array of them."""

from __future__ import annotations

import string
from collections.abc import Container

from deployments.openai.parsers.output_parser import (
    BufferedParser,
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    State,
)
from deployments.openai.parsers.partial_tool_call import PartialToolCall

_BEFORE = string.whitespace + "["
_BETWEEN = string.whitespace + ",;]"  # Llama 3 separates calls by semicolons


class JsonCallsParser(BufferedParser):
    """An answer that does not begin with a call of one of the functions `names` is content.

    Nothing else tells a call from an answer in JSON, so the name has to be known.
    """

    def __init__(self, names: Container[str], *, streaming: bool):
        super().__init__()
        self._names, self._streaming = names, streaming
        self._skipped = ""  # before the call that is being read
        self._called = False
        self._call = PartialToolCall(names, streaming=streaming)

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip(_BETWEEN if self._called else _BEFORE)
        if rest.startswith("{"):
            self._skipped, self._buffer = self._buffer[: -len(rest)], rest
            self._call = PartialToolCall(self._names, streaming=self._streaming)
            return self._in_call
        if rest or (final and not self._called):
            return self._content
        return None

    def _in_call(self, out: list[OutputEvent], final: bool) -> State | None:
        events, self._buffer = self._call.add(self._buffer, final)
        out += events
        if not self._call.ended:
            return None
        if self._call.failed:
            out.append(Content(self._skipped + self._call.raw))
            return self._content
        self._called = True
        return self._start

    def _content(self, out: list[OutputEvent], final: bool) -> State | None:
        if self._buffer:
            out.append(Content(self._buffer))
            self._buffer = ""
        return None


class NamedCallParser:
    """Parses an output that is nothing but the arguments of one function, because the request named it."""

    def __init__(self, name: str):
        self._name = name
        self._started = False

    def add(self, text: str) -> list[OutputEvent]:
        if not self._started:
            text = text.lstrip()
            if text:
                self._started = True
                return [CallStart(self._name), CallArguments(text)]
        return [CallArguments(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []

"""Outputs that are tool calls and nothing else: JSON objects, a JSON array of them, or the arguments of one call."""

from __future__ import annotations

import string
from collections.abc import Container

from deployments.openai.parsers.output_parser import (
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    State,
)
from deployments.openai.parsers.partial_tool_call import PartialToolCall

_BEFORE = string.whitespace + "["
_BETWEEN = string.whitespace + ",;]"  # Llama 3 separates calls by semicolons


class JsonCallsParser(OutputParser):
    """Parses JSON objects one after the other, or a JSON array of them.

    An output that does not begin with a call of one of the functions `names` is content: only a known name
    distinguishes a call from an answer in JSON.
    """

    def __init__(self, names: Container[str], *, streaming: bool, forced: bool = False):
        """forced: the output can be nothing but calls, so what is no call is one that max_tokens cut off: dropped."""
        super().__init__()
        self._forced = forced
        self._names, self._streaming = names, streaming
        self._skipped = ""  # before the current call
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
            self._buffer = self._skipped + self._call.raw + self._buffer
            return self._content
        self._called = True
        return self._start

    def _content(self, out: list[OutputEvent], final: bool) -> State | None:
        if self._buffer:
            if not self._forced:
                out.append(Content(self._buffer))
            self._buffer = ""
        return None


class NamedCallParser(OutputParser):
    """Parses the arguments of the one function that the request named."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        out.append(CallStart(self._name))
        return self._arguments

    def _arguments(self, out: list[OutputEvent], final: bool) -> State | None:
        if self._buffer:
            out.append(CallArguments(self._buffer))
            self._buffer = ""
        return None

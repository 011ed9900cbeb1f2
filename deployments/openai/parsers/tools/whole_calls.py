"""Outputs that consist of tool calls only: JSON objects, a list of calls, or the arguments of one call."""

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
from deployments.openai.parsers.tools.call_reader import CallReader
from deployments.openai.parsers.tools.json_call import JsonCall
from deployments.openai.parsers.tools.pythonic_call import PythonicCall

MAX_SPACE = 64  # characters of white space before a call


class JsonCallsParser(OutputParser):
    """Parses consecutive JSON objects, or a JSON array of them, as calls.

    An output that does not begin with a call of one of the functions `names` is content, because only a known name
    distinguishes a call from an answer in JSON.
    """

    opening = ""  # text that must precede the first call

    def __init__(self, names: Container[str], *, streaming: bool, forced: bool = False):
        """forced: whether the output can only consist of calls. Text that is not a call is then a call cut off by
        max_tokens, and is dropped."""
        super().__init__()
        self._forced = forced
        self._names, self._streaming = names, streaming
        self._skipped = ""  # skipped characters before the current call
        self._called = False
        self._call: CallReader

    def _new_call(self) -> CallReader:
        return JsonCall(self._names, streaming=self._streaming)

    def _begins_call(self, char: str) -> bool:
        return char == "{"

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        # Llama 3 separates calls by semicolons
        rest = self._buffer.lstrip(string.whitespace + (",;]" if self._called else "["))
        space = self._buffer[: len(self._buffer) - len(rest)]
        if len(space) > MAX_SPACE:
            return self._content
        if rest and self._begins_call(rest[0]) and (self._called or self.opening in space):
            self._skipped, self._buffer = space, rest
            self._call = self._new_call()
            return self._in_call
        if rest or (final and not self._called):
            return self._content
        return None

    def _in_call(self, out: list[OutputEvent], final: bool) -> State | None:
        out += self._call.read(self._buffer, final=final)
        self._buffer = ""
        if not self._call.ended:
            return None
        self._buffer = self._call.rest
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


class PythonicCallsParser(JsonCallsParser):
    """Parses a list of Python calls: `[f(a=1), g(b="x")]`."""

    opening = "["

    def _new_call(self) -> CallReader:
        return PythonicCall(self._names, streaming=self._streaming)

    def _begins_call(self, char: str) -> bool:
        return char.isidentifier()


class NamedCallParser(OutputParser):
    """Parses the arguments of the function named in the request."""

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

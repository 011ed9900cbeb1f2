"""Outputs whose calls no marker announces: JSON objects, a list of calls, or the arguments of one call."""

from __future__ import annotations

from collections.abc import Collection

from deployments.openai.parsers.output_parser import (
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    State,
)
from deployments.openai.parsers.tools.call_reader import MAX_HEAD, CallReader
from deployments.openai.parsers.tools.json_call import JsonCall
from deployments.openai.parsers.tools.marked_calls import MAX_SPACE, without_last_space
from deployments.openai.parsers.tools.pythonic_call import PythonicCall

_CLOSERS = {"{": "}", "[": "]"}


class JsonCallsParser(OutputParser):
    """Parses JSON objects, and JSON arrays of them, as calls. Other text is content; white space around calls is
    dropped.

    An object or array that is no call of one of the functions `names` is content, with all that stands inside, because
    only a known name distinguishes a call from an answer in JSON.
    """

    _begins: tuple[str, ...] = ("{", "[")

    def __init__(self, names: Collection[str], *, forced: bool = False):
        """forced: whether the output can only consist of calls. Other text is then a call cut off by max_tokens, and is
        dropped."""
        super().__init__()
        self._forced = forced
        self._names = names
        self._skipped = ""  # skipped characters before the current call
        self._called = self._in_list = False
        self._call: CallReader
        self._open: list[str] = []  # closing brackets that are due in JSON that is content
        self._in_string = self._escaped = False

    def _new_call(self) -> CallReader:
        return JsonCall(self._names)

    def _is_call(self, text: str) -> bool | None:
        """Return whether a call may begin with this text; None if that needs more text."""
        if text and not text.startswith("{"):
            return False
        rest = text[1:].lstrip()
        return rest.startswith('"') if rest else None

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        found = [place for char in self._begins if (place := self._buffer.find(char)) >= 0]
        if found:
            start = min(found)
            before = without_last_space(self._buffer[:start])
            self._emit(out, before)
            self._skipped, self._buffer = self._buffer[len(before) : start], self._buffer[start:]
            return self._candidate
        ready = self._buffer if final and not self._called else without_last_space(self._buffer)
        self._emit(out, ready)
        self._buffer = self._buffer[len(ready) :]
        return None

    def _candidate(self, out: list[OutputEvent], final: bool) -> State | None:
        """Decide whether the buffer begins with a call, alone or in a list."""
        opens_list = self._buffer.startswith("[")
        rest = self._buffer[1:].lstrip() if opens_list else self._buffer
        space = len(self._buffer) - len(rest)
        is_call = self._is_call(rest) if space <= MAX_SPACE else False
        if is_call is None and not final:
            return None
        if not is_call:
            return self._no_call(out, self._buffer)
        self._skipped, self._buffer = self._skipped + self._buffer[:space], rest
        self._in_list = self._in_list or opens_list
        self._call = self._new_call()
        return self._in_call

    def _no_call(self, out: list[OutputEvent], text: str) -> State:
        """Read a JSON text, or one character, as content. text: what is left after what was skipped."""
        self._emit(out, self._skipped)
        self._buffer, self._skipped, self._in_list = text, "", False
        self._open = []
        if text[:1] in _CLOSERS and (text[1:].lstrip()[:1] or " ") in '"{[-0123456789':
            return self._json
        self._emit(out, text[:1])
        self._buffer = text[1:]
        return self._start

    def _json(self, out: list[OutputEvent], final: bool) -> State | None:
        for end, char in enumerate(self._buffer, 1):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in _CLOSERS:
                self._open.append(_CLOSERS[char])
            elif char in ("}", "]"):
                self._open.pop()
                if not self._open:
                    self._emit(out, self._buffer[:end])
                    self._buffer = self._buffer[end:]
                    return self._start
        self._emit(out, self._buffer)
        self._buffer = ""
        return None

    def _in_call(self, out: list[OutputEvent], final: bool) -> State | None:
        out += self._call.read(self._buffer, final=final, cut=self._cut)
        self._buffer = ""
        if not self._call.ended:
            return None
        self._buffer = self._call.rest
        if self._call.failed:
            return self._bad_call
        self._called = True
        return self._after_call

    def _bad_call(self, out: list[OutputEvent], final: bool) -> State | None:
        text = self._skipped + self._call.raw + self._buffer
        self._skipped = text[: len(text) - len(text.lstrip(" \n\r\t,;"))]
        return self._no_call(out, text[len(self._skipped) :])

    def _after_call(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if self._in_list and rest.startswith("]"):
            self._buffer, self._in_list = rest[1:], False
            return self._after_call
        if rest.startswith((",", ";")):  # Llama 3 separates calls by semicolons
            next_call = rest[1:].lstrip()
            if next_call.startswith(self._begins) or (self._in_list and self._is_call(next_call)):
                self._skipped, self._buffer = self._buffer[: len(self._buffer) - len(next_call)], next_call
                return self._candidate
            if next_call and (not self._in_list or self._is_call(next_call) is False):
                return self._start
        elif rest:
            return self._start
        if len(self._buffer) > MAX_SPACE:
            return self._start
        if final and not rest.strip(",; \n"):
            self._buffer = ""
        return self._start if final and self._buffer else None

    def _emit(self, out: list[OutputEvent], text: str) -> None:
        if text and not self._forced:
            out.append(Content(text))


class PythonicCallsParser(JsonCallsParser):
    """Parses lists of Python calls: `[f(a=1), g(b="x")]`."""

    _begins = ("[",)

    def _new_call(self) -> CallReader:
        return PythonicCall(self._names)

    def _is_call(self, text: str) -> bool | None:
        name, bracket, _ = text.partition("(")
        if bracket:
            return name.strip() in self._names
        return None if any(known.startswith(name.strip()) for known in self._names) else False

    def _candidate(self, out: list[OutputEvent], final: bool) -> State | None:
        if not self._buffer.startswith("[") and not self._in_list:
            return self._no_call(out, self._buffer)
        return super()._candidate(out, final)

    def _bad_call(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if self._call.complete and not rest and not final and len(self._buffer) <= MAX_SPACE:
            return None
        has_next = self._call.complete and self._in_list and rest.startswith(",")
        if not has_next and len(self._call.raw) <= MAX_HEAD:
            return super()._bad_call(out, final)
        self._emit(out, self._skipped + self._call.raw)  # if it is long, no other call may begin inside
        self._skipped = ""
        return self._after_call if has_next else self._start

    def _no_call(self, out: list[OutputEvent], text: str) -> State:
        self._emit(out, self._skipped + text[:1])
        self._buffer, self._skipped, self._in_list = text[1:], "", False
        return self._start


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

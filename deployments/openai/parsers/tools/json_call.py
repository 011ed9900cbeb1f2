"""One tool call whose arguments are a JSON object."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import msgspec

from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent, State
from deployments.openai.parsers.tools.call_reader import CallReader

_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen write the first, Llama the second
_KEYS = {"name", "type", "id", *_ARGUMENTS}
_MAX_BEFORE_ARGUMENTS = 1000  # characters; a call with more is read once it is complete


class JsonCall(CallReader):
    """Reads `{"name": ..., "arguments": {...}}`, with keys in any order.

    In a stream, arguments that are not valid JSON are passed on as the model wrote them.
    """

    _outer_depth = 0  # number of open braces at the end of the call

    def __init__(self, names: Container[str] | None, *, streaming: bool):
        """names: functions that may be called; None for any."""
        super().__init__(streaming=streaming)
        self._names = names
        self._depth = 0
        self._in_string = self._escaped = self._has_key = False
        self._name: str | None = None
        self._id: str | None = None
        self._length = 0  # characters before those in the buffer
        self._arguments_start = 0  # once there is a name
        self._arguments_end: int | None = None

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        base, end = self._length, self._scan(self._buffer)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._length += end
        self.ended = self.ended or final
        if self.failed:
            return None
        if not self._streaming:
            if self.ended:
                self._full_call(out)
        elif self._name is not None:
            if not self._begun:
                self._begin(out, self._name, self._id)
            stop = self._length if self._arguments_end is None else self._arguments_end
            if arguments := text[max(0, self._arguments_start - base) : max(0, stop - base)]:
                out.append(CallArguments(arguments))
        elif self.ended:
            self._full_call(out)
        return None

    def _scan(self, text: str) -> int:
        """Return how many characters belong to the object. A `<` ends it, because JSON has no `<` outside strings."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
                if self._depth == 2 and char == "{" and self._name is None:
                    self._look_for_name(self._length + i)
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self._name is not None and self._arguments_end is None:
                    self._arguments_end = self._length + i + 1
                self.ended = self._depth <= self._outer_depth
            elif char == ":" and self._depth == 1 and not self._has_key:
                self._check_key(self._length + i)
            elif char == "<" or (self._depth == 0 and not char.isspace()):
                self.ended = True
                return i
            if self.ended:
                return i + 1
        return len(text)

    def _check_key(self, end: int) -> None:
        """Fail at the first key if the object is not a call, so that an answer in JSON is not held back until it
        ends."""
        self._has_key = True
        members = json_object("".join(self._pieces)[:end] + ":0}")
        if members is None or next(iter(members)) not in _KEYS:
            self.ended = self.failed = True

    def _look_for_name(self, end: int) -> None:
        """Check whether the object that starts at this offset contains the arguments of a known function."""
        if end > _MAX_BEFORE_ARGUMENTS:
            return
        members = json_object("".join(self._pieces)[:end] + "{}}")
        if members is None or next(reversed(members)) not in _ARGUMENTS or "name" not in members:
            return
        if self._allows(members["name"]):
            self._name, self._arguments_start = members["name"], end
        else:
            self.ended = self.failed = True

    def _full_call(self, out: list[OutputEvent]) -> None:
        if self._name is not None:
            arguments = self.raw[self._arguments_start : self._arguments_end]
            self.failed = json_object(arguments) is None
            if not self.failed:
                out += [CallStart(self._name, self._id), CallArguments(arguments)]
            return
        members = json_object(self.raw) or {}
        name: Any = members.get("name")
        given: Any = next((members[key] for key in _ARGUMENTS if key in members), {})
        self.failed = not self._allows(name) or not isinstance(given, dict)
        if not self.failed:
            out += [CallStart(name), CallArguments(msgspec.json.encode(given).decode())]

    def _allows(self, name: Any) -> bool:
        return isinstance(name, str) and name != "" and (self._names is None or name in self._names)


class NamedJsonCall(JsonCall):
    """Reads a function's name in the family's markup, then its arguments as a JSON object."""

    _outer_depth = 1

    def __init__(self, head: str, *, streaming: bool):
        """head: regular expression for all text before the arguments, with a group `name` and optionally `id`."""
        super().__init__(None, streaming=streaming)
        self._head = re.compile(head, re.DOTALL)
        self._state = self._start_named

    def _start_named(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head("{")
        if head is None:
            return self._lacks_head("{")
        self._buffer = "{" + self._buffer
        found = self._head.fullmatch(head)
        if found is None:
            return self._fail()
        self._name, self._id = found["name"], found.groupdict().get("id")
        self._depth = self._outer_depth
        self._length = self._arguments_start = len(head)
        return self._start


def json_object(text: str) -> dict[str, Any] | None:
    """Return the decoded object; None if `text` is not a JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

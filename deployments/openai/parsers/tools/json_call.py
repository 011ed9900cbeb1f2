"""One tool call whose arguments are a JSON object."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import msgspec

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.call_reader import MAX_HEAD, CallReader
from deployments.openai.parsers.tools.json_string import JsonString

_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen write the first, Llama the second
_KEYS = {"name", "type", "id", *_ARGUMENTS}
_MAX_BEFORE_ARGUMENTS = 1000  # characters; a call with more is read once it is complete
_STRUCTURE = re.compile(r'["{}\[\]:<]')
_CLOSERS = {"{": "}", "[": "]"}


class JsonCall(CallReader):
    """Reads `{"name": ..., "arguments": {...}}`, with keys in any order. Arguments may be a string that contains them.

    Strings are written as JSON allows them, and brackets that a complete call lacks are added. Other arguments that
    are not valid JSON are passed on as the model wrote them.
    """

    _outer_depth = 0  # number of open brackets at the end of the call

    def __init__(self, names: Container[str] | None):
        """names: functions that may be called; None for any."""
        super().__init__()
        self._names = names
        self._open: list[str] = []  # the closing brackets that are due, the innermost last
        self._string = JsonString()
        self._has_key = False
        self._name: str | None = None
        self._id: str | None = None
        self._text: list[str] = []  # the object as JSON, until there is a name
        self._new: list[str] = []  # what the current text adds to it
        self._length = 0
        self._last = ""  # last character that is not white space
        self._arguments_start = 0  # once there is a name
        self._arguments_end: int | None = None

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        base, self._new = self._length, []
        complete = self._scan(final) or (final and not self._cut)
        self.ended = self.ended or final
        if self.failed:
            return None
        if self._name is None:
            if self.ended:
                self._full_call(out, self._missing() if complete else "")
            return None
        if not self._begun:
            self._begin(out, self._name, self._id)
        missing = self._missing() if self.ended and complete and self._arguments_end is None else ""
        stop = self._length if self._arguments_end is None else self._arguments_end
        arguments = "".join(self._new)[max(0, self._arguments_start - base) : max(0, stop - base)] + missing
        if arguments:
            out.append(CallArguments(arguments))
        return None

    def _write(self, text: str) -> None:
        self._new.append(text)
        if self._name is None:
            self._text.append(text)
        self._length += len(text)
        self._last = text.rstrip()[-1:] or self._last

    def _scan(self, final: bool) -> bool:
        """Take what belongs to the object from the buffer. Returns whether a marker, and no more of it, follows."""
        text, start = self._buffer, 0
        while start < len(text) and not self.ended:
            if self._string.is_open:
                written, text, start = self._string.read(text, start)
                self._write(written)
                continue
            if not self._open:
                end = start + len(text[start:]) - len(text[start:].lstrip())
            else:
                found = _STRUCTURE.search(text, start)
                end = len(text) if found is None else found.start()
            self._write(text[start:end])
            start = end
            if start == len(text):
                break
            char = text[start]
            belongs = char not in "<}]" or char in self._open if self._open else char in _CLOSERS
            follows = False if belongs else self._marker_follows(text[start:])
            if follows is None:
                if not final:
                    break
                follows = not self._cut
            if follows or (char == "<" or (not self._open and not belongs)):
                self.ended, self._buffer = True, text[start:]
                return follows
            self._structure(char)
            start += 1
        self._buffer = text[start:]
        return False

    def _structure(self, char: str) -> None:
        if char == '"':
            self._string.open()
        elif char == ":" and len(self._open) == 1 and not self._has_key:
            self._check_key()
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
            if len(self._open) == 2 and char == "{" and self._name is None:
                self._look_for_name()
        elif char in self._open:
            while self._open[-1] != char:  # it lacks a bracket
                self._close()
            self._close()
            return
        self._write(char)

    def _close(self) -> None:
        self._write(self._open.pop())
        if len(self._open) == 1 and self._name is not None and self._arguments_end is None:
            self._arguments_end = self._length
        self.ended = len(self._open) <= self._outer_depth

    def _marker_follows(self, text: str) -> bool | None:
        """Return whether a marker comes next, perhaps after brackets; None if that needs more text."""
        rest = text[:MAX_HEAD].lstrip("}] \n\t")
        if rest.startswith(self.markers):
            return True
        return None if any(marker.startswith(rest) for marker in ("", *self.markers)) else False

    def _missing(self) -> str:
        """Return the brackets that close the arguments, or the object if there is no name yet."""
        if self._string.is_open or self._last in (",", ":"):
            return ""
        return "".join(reversed(self._open[0 if self._name is None else 1 :]))

    def _check_key(self) -> None:
        """Fail at the first key if the object is not a call, so that an answer in JSON is not held back until it
        ends."""
        self._has_key = True
        members = json_object("".join(self._text) + ":0}")
        if members is None or next(iter(members)) not in _KEYS:
            self.ended = self.failed = True

    def _look_for_name(self) -> None:
        """Check whether the object that starts here contains the arguments of a known function."""
        if self._length > _MAX_BEFORE_ARGUMENTS:
            return
        members = json_object("".join(self._text) + "{}}")
        if members is None or next(reversed(members)) not in _ARGUMENTS or "name" not in members:
            return
        if self._allows(members["name"]):
            self._name, self._arguments_start = members["name"], self._length
        else:
            self.ended = self.failed = True

    def _full_call(self, out: list[OutputEvent], missing: str) -> None:
        """Read a call whose name did not come before its arguments, or whose arguments are no object."""
        members = json_object("".join(self._text) + missing) or {}
        name: Any = members.get("name")
        has_arguments = any(key in members for key in _ARGUMENTS)
        given: Any = next((members[key] for key in _ARGUMENTS if key in members), None)
        if isinstance(given, str):
            given = json_object(given) if given.strip() else {}
        elif given is None:
            given = {}
        known = has_arguments or members.keys() <= _KEYS  # else its other members may be the arguments
        begun = has_arguments or not missing
        self.failed = not (self._allows(name) and isinstance(given, dict) and known and begun)
        self.complete = not self._open
        if not self.failed:
            self._begin(out, name)
            out.append(CallArguments(msgspec.json.encode(given).decode()))

    def _allows(self, name: Any) -> bool:
        return isinstance(name, str) and name != "" and (self._names is None or name in self._names)


class NamedJsonCall(JsonCall):
    """Reads a function's name in the family's markup, then its arguments as a JSON object."""

    _outer_depth = 1

    def __init__(self, head: str):
        """head: regular expression for all text before the arguments, with a group `name` and optionally `id`."""
        super().__init__(None)
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
        self._open = [""]
        return self._start


def json_object(text: str) -> dict[str, Any] | None:
    """Return the decoded object; None if `text` is not a JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

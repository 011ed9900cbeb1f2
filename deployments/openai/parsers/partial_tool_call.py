"""One tool call, written as a JSON object, parsed while it arrives."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent

_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen write the first, Llama the second
_KEYS = {"name", "type", "id", *_ARGUMENTS}


class PartialToolCall:
    """Parses `{"name": ..., "arguments": {...}}`, keys in any order."""

    def __init__(self, names: Container[str] | None, *, streaming: bool):
        """names: the functions that may be called; None means any.

        streaming: hand out the name and the arguments while they arrive. Once that has begun, arguments that are not
        valid JSON are passed on as the model wrote them; without streaming, they make the call fail.
        """
        self.raw = ""  # the characters read so far
        self.ended = False  # the object is complete, or cannot be a tool call
        self.failed = False  # it ended, and is not a tool call
        self._names, self._streaming = names, streaming
        self._depth = 0
        self._in_string = self._escaped = False
        self._name: str | None = None
        self._start = 0  # the arguments are raw[_start:_end], once there is a name
        self._end: int | None = None
        self._sent = 0

    def add(self, text: str, final: bool) -> tuple[list[OutputEvent], str]:
        """Return the events that are certain now, and the text after the object. final: the text is complete."""
        end = self._scan(text)
        self.raw += text[:end]
        self.ended = self.ended or final
        return self._events(), text[end:]

    def _scan(self, text: str) -> int:
        """Return how many characters belong to the object. `<` ends it: outside strings, JSON has none."""
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
                    self._look_for_name(self.raw + text[:i])
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self._name is not None and self._end is None:
                    self._end = len(self.raw) + i + 1
                self.ended = self._depth <= 0
            elif char == ":" and self._depth == 1 and self._name is None:
                self._check_key(self.raw + text[:i])
            elif char == "<" or (self._depth == 0 and not char.isspace()):
                self.ended = True
                return i
            if self.ended:
                return i + 1
        return len(text)

    def _check_key(self, head: str) -> None:
        """Give up on some other JSON object at its first key: an answer in JSON need not wait for its end."""
        members = _json_object(head + ":0}")
        if members is None or next(iter(members)) not in _KEYS:
            self.ended = self.failed = True

    def _look_for_name(self, head: str) -> None:
        """Check whether the object inside the object that starts after `head` has the arguments of a known name."""
        members = _json_object(head + "{}}")
        if members is None or next(reversed(members)) not in _ARGUMENTS or "name" not in members:
            return
        if self._allows(members["name"]):
            self._name, self._start = members["name"], len(head)
        else:
            self.ended = self.failed = True

    def _events(self) -> list[OutputEvent]:
        if self.failed:
            return []
        if self._streaming and self._name is not None:
            return self._streamed_events(self._name)
        return self._full_call() if self.ended else []

    def _streamed_events(self, name: str) -> list[OutputEvent]:
        events: list[OutputEvent] = [] if self._sent else [CallStart(name)]
        start, self._sent = max(self._start, self._sent), min(len(self.raw), self._end or len(self.raw))
        return [*events, CallArguments(self.raw[start : self._sent])] if start < self._sent else events

    def _full_call(self) -> list[OutputEvent]:
        if self._name is not None:
            arguments = self.raw[self._start : self._end]
            self.failed = _json_object(arguments) is None
            return [] if self.failed else [CallStart(self._name), CallArguments(arguments)]
        members = _json_object(self.raw) or {}
        name: Any = members.get("name")
        given: Any = next((members[key] for key in _ARGUMENTS if key in members), {})
        self.failed = not self._allows(name) or not isinstance(given, dict)
        return [] if self.failed else [CallStart(name), CallArguments(msgspec.json.encode(given).decode())]

    def _allows(self, name: Any) -> bool:
        return isinstance(name, str) and name != "" and (self._names is None or name in self._names)


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the decoded object, or None if `text` is anything else."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

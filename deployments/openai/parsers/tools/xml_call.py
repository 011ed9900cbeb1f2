"""One tool call whose arguments are tagged texts: `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.argument_types import argument_types, json_value
from deployments.openai.parsers.tools.call_reader import NAME, CallReader

# text between the tags around an argument's name; DeepSeek marks whether the value is text
_KEY = re.compile(r"""\s*["']?(?P<key>[^"'<>]+?)["']?(?:\s+string="(?P<text>true|false)")?\s*(?:</arg_key>)?\s*""")


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlTags:
    """Tags inside a call."""

    name_end: str = ">"
    """Text after the function's name. The `<` of a following tag is not part of it."""
    key: str
    """Tag before the name of an argument."""
    key_end: str = ">"
    value_end: str
    call_end: str
    lines: bool = False
    """Whether values are on lines of their own."""


class XmlCall(CallReader):
    """Reads a function's name, then its arguments, each converted to a type that its schema allows.

    In a stream, text arguments are emitted as the model writes them, and other arguments once they are complete.
    """

    def __init__(self, tags: XmlTags, tools: Mapping[str, dict[str, Any]], *, streaming: bool):
        """tools: JSON schema of the arguments by function name."""
        super().__init__(streaming=streaming)
        self.end_marker = tags.call_end
        self._tags, self._tools = tags, tools
        self._schema: dict[str, Any] = {}
        self._separator = "{"
        self._types: frozenset[str] = frozenset()
        self._value_pieces: list[str] = []

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head(self._tags.name_end)
        if head is None:
            return self._lacks_head(self._tags.name_end)
        if self._tags.name_end == "<":
            self._buffer = "<" + self._buffer
        name = head.strip().strip("\"'")
        if not re.fullmatch(NAME, name):
            return self._fail()
        self._schema = self._tools.get(name, {})
        self._begin(out, name)
        return self._argument

    def _argument(self, out: list[OutputEvent], final: bool) -> State | None:
        self._buffer = self._buffer.lstrip()
        for tag, state in ((self._tags.call_end, self._call_end), (self._tags.key, self._key)):
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                return state
        if any(tag.startswith(self._buffer) for tag in (self._tags.call_end, self._tags.key)):
            return None
        return self._fail()

    def _key(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head(self._tags.key_end)
        if head is None:
            return self._lacks_head(self._tags.key_end)
        found = _KEY.fullmatch(head)
        if found is None:
            return self._fail()
        if found["text"]:
            self._types = frozenset({"string"} if found["text"] == "true" else ())
        else:
            self._types = argument_types(self._schema, found["key"])
        out.append(CallArguments(f"{self._separator}{json.dumps(found['key'], ensure_ascii=False)}: "))
        if self._types == {"string"}:
            out.append(CallArguments('"'))
        self._separator, self._value_pieces = ", ", []
        return self._first_line if self._tags.lines else self._value

    def _first_line(self, out: list[OutputEvent], final: bool) -> State | None:
        if not self._buffer:
            return None
        self._buffer = self._buffer.removeprefix("\n")
        return self._value

    def _value(self, out: list[OutputEvent], final: bool) -> State | None:
        text, complete = self._take_until(self._tags.value_end)
        if self._tags.lines and text.endswith("\n"):  # it belongs to the markup if the value ends here
            text = text[:-1]
            if not complete:
                self._buffer = "\n" + self._buffer
        if self._types != {"string"}:
            self._value_pieces.append(text)
            if complete:
                out.append(CallArguments(json_value("".join(self._value_pieces), self._types)))
        elif text or complete:
            out.append(CallArguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if complete else "")))
        return self._argument if complete else None

    def _call_end(self, out: list[OutputEvent], final: bool) -> State | None:
        out.append(CallArguments("{}" if self._separator == "{" else "}"))
        self.ended = True
        return None

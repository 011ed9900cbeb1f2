"""One tool call whose arguments are tagged texts: `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.argument_types import argument_types, json_value
from deployments.openai.parsers.tools.call_reader import MAX_HEAD, NAME, CallReader
from deployments.openai.parsers.tools.json_call import json_object
from engine.text.detokenizer import start_of_possible

# text between the tags around an argument's name; DeepSeek marks whether the value is text
_KEY = re.compile(r"""\s*["']?(?P<key>[^"'<>]+?)["']?(?:\s+string="(?P<text>true|false)")?\s*(?:</arg_key>)?\s*""")
SIMILAR = 0.8  # share of characters that a damaged tag has in common with the right one
_WRAPPERS = ("arguments", "input", "parameters")  # names under which models write all arguments as one object


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlTags:
    """Tags of a call."""

    name_end: str = ">"
    """Text after the function's name. The `<` of a following tag is not part of it."""
    key: str
    """Tag before the name of an argument."""
    key_end: str = ">"
    value_end: str
    call_end: str
    lines: bool = False
    """Whether values are on lines of their own."""
    opens: tuple[str, ...]
    """Markers with which the next call begins."""
    closes: tuple[str, ...]
    """Markers after the last call."""


class XmlCall(CallReader):
    """Reads a function's name, then its arguments, each converted to a type that its schema allows.

    Text arguments are emitted as the model writes them, and other arguments once they are complete. A value ends at the
    last closing tag before the next tag of the call, since a closing tag may also stand inside of a value; without one,
    it ends at the tag of another argument that the function has, or where the call ends. Text between the tags is
    dropped.
    """

    def __init__(self, tags: XmlTags, tools: Mapping[str, dict[str, Any]]):
        """tools: JSON schema of the arguments by function name."""
        super().__init__()
        self.end_marker = tags.call_end
        self._tags, self._tools = tags, tools
        self._in_value = (tags.value_end, tags.key, tags.call_end, *tags.closes)
        self._schema: dict[str, Any] = {}
        self._properties: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._separator = "{"
        self._key_name = ""
        self._types: frozenset[str] = frozenset()
        self._pieces_of_value: list[str] = []
        self._scanned = 0  # start of the part of the buffer that has not been searched for tags
        self._possible_end = 0  # place of the tag with which the call may end
        self._between = ""  # text between tags

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head(self._tags.name_end)
        if head is None and final and not self._cut and self._buffer.strip() in self._tools:
            head, self._buffer = self._buffer, ""
        if head is None:
            return self._lacks_head(self._tags.name_end)
        if self._tags.name_end == "<":
            self._buffer = "<" + self._buffer
        name = head.strip().strip("\"'")
        if not re.fullmatch(NAME, name):
            return self._fail()
        self._schema = self._tools.get(name, {})
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._begin(out, name)
        return self._argument

    def _argument(self, out: list[OutputEvent], final: bool) -> State | None:
        tags = self._tags
        after = (*tags.opens, *tags.closes)
        structure = (tags.key, tags.call_end, *after)
        found = self._find(structure, 0)
        start = start_of_possible(structure, self._buffer) if found is None else found[0]
        self._between += self._buffer[:start]
        self._buffer = self._buffer[start:]
        if found is None:
            return self._call_end(out) if final and not self._cut else None
        if found[1] not in after:
            self._buffer = self._buffer[len(found[1]) :]
        return self._key if found[1] == tags.key else self._call_end(out)

    def _key(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head(self._tags.key_end)
        if head is None:
            return self._lacks_head(self._tags.key_end)
        found = _KEY.fullmatch(head)
        if found is None:
            return self._fail()
        key = found["key"]
        self._keys.add(key)
        self._key_name, self._pieces_of_value = key, []
        if self._is_wrapper(key):
            self._types = frozenset()
        elif key in self._properties or not found["text"]:
            self._types = argument_types(self._schema, key)
        else:
            self._types = frozenset({"string"} if found["text"] == "true" else ())
        if self._types == {"string"}:
            self._member(out, key, '"')
        return self._first_line if self._tags.lines else self._value

    def _is_wrapper(self, key: str) -> bool:
        return key in _WRAPPERS and bool(self._properties) and key not in self._properties

    def _member(self, out: list[OutputEvent], key: str, value: str) -> None:
        out.append(CallArguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
        self._separator = ", "

    def _first_line(self, out: list[OutputEvent], final: bool) -> State | None:
        if not self._buffer:
            return None
        self._buffer = self._buffer.removeprefix("\n")
        return self._value

    def _value(self, out: list[OutputEvent], final: bool) -> State | None:
        found = self._find(self._in_value, 0)
        if found is None:
            ready = self._before_line_breaks(start_of_possible(self._in_value, self._buffer))
            self._put(out, ready if final else self._before_line_breaks(self._last_tag(ready)))
            return None
        start, tag = found
        if tag == self._tags.value_end:
            return self._closing_tag(out, start)
        length = self._before_line_breaks(self._last_tag(self._before_line_breaks(start)))
        self._put(out, length)
        start -= length
        ends = self._ends_value(start, tag)
        if ends is None and not final:
            return None
        if ends is False:
            self._put(out, start + len(tag))
            return self._value
        if not self._is_closing_tag(self._buffer[:start].strip("\n")):
            length = self._before_line_breaks(start)
            self._put(out, length)
            start -= length
        self._scanned, self._possible_end = start + len(tag), start
        return self._end_value(out, start) if tag == self._tags.key else self._possible_call_end

    def _closing_tag(self, out: list[OutputEvent], start: int) -> State:
        """Emit what stands before the closing tag, which may end the value. The buffer then begins with the tag, or
        with the line break before it."""
        self._put(out, start - (self._tags.lines and self._buffer[start - 1 : start] == "\n"))
        return self._after_closing_tag

    def _after_closing_tag(self, out: list[OutputEvent], final: bool) -> State | None:
        tags, end = self._tags, int(self._buffer.startswith("\n")) + len(self._tags.value_end)
        rest = self._buffer[end:].lstrip()
        structure = (tags.key, tags.call_end, *tags.closes, *tags.opens)
        if rest.startswith(structure):
            return self._end_value(out, len(self._buffer) - len(rest))
        if any(tag.startswith(rest) for tag in structure):
            return self._end_value(out, end) if final else None
        self._scanned = end
        return self._between_closing_tags

    def _between_closing_tags(self, out: list[OutputEvent], final: bool) -> State | None:
        """Look for the tag that decides whether the closing tag at the start of the buffer ended the value."""
        found = self._find(self._in_value, self._scanned)
        if found is None:
            self._scanned = max(self._scanned, len(self._buffer) - MAX_HEAD)
            if final and self._cut:
                self._put(out, len(self._buffer))
            return self._end_value(out, len(self._buffer)) if final and not self._cut else None
        start, tag = found
        if tag == self._tags.value_end:
            return self._closing_tag(out, start)
        ends = self._ends_value(start, tag)
        if ends is None and not final:
            return None
        if ends is False:
            self._scanned = start + len(tag)
            return self._between_closing_tags
        self._scanned, self._possible_end = start + len(tag), start
        return self._end_damaged_value(out) if tag == self._tags.key else self._possible_call_end

    def _possible_call_end(self, out: list[OutputEvent], final: bool) -> State | None:
        """Look for a closing tag of the value behind the tag with which the call may end."""
        found = self._find((self._tags.value_end, *self._tags.opens), self._scanned)
        if found is None and not final:
            self._scanned = max(self._scanned, len(self._buffer) - MAX_HEAD)
            return None
        if found is not None and found[1] == self._tags.value_end:
            return self._closing_tag(out, found[0])
        return self._end_damaged_value(out)

    def _end_damaged_value(self, out: list[OutputEvent]) -> State:
        """End a value before `_possible_end`; if the buffer begins with its closing tag, text follows that."""
        text = self._buffer[: self._possible_end].lstrip("\n")
        self._between += text.removeprefix(self._tags.value_end)
        return self._end_value(out, self._possible_end)

    def _ends_value(self, start: int, tag: str) -> bool | None:
        """Return whether the tag at this place is one of the call, not a part of a text; None if that needs more
        text."""
        tags, rest = self._tags, self._buffer[start + len(tag) :]
        if tag == tags.key:
            end = rest.find(tags.key_end, 0, MAX_HEAD)
            if end < 0:
                return None if len(rest) < MAX_HEAD else False
            found = _KEY.fullmatch(rest[:end])
            if found is None or found["key"] in self._keys:
                return False
            return not self._properties or found["key"] in self._properties
        rest, after = rest.lstrip(), (*tags.opens, *tags.closes)
        if tag in tags.closes or not tags.closes or rest.startswith(after):
            return True
        return None if any(marker.startswith(rest) for marker in after) else False

    def _end_value(self, out: list[OutputEvent], taken: int) -> State:
        """End the value, and take this many characters from the buffer."""
        self._buffer = self._buffer[taken:]
        if self._types == {"string"}:
            out.append(CallArguments('"'))
            return self._argument
        value, key = "".join(self._pieces_of_value), self._key_name
        if self._is_wrapper(key):
            members = json_object(value)
            if members is not None and members.keys() <= self._properties.keys():
                for name, member in members.items():
                    self._member(out, name, json.dumps(member, ensure_ascii=False))
                return self._argument
        self._member(out, key, json_value(value, self._types))
        return self._argument

    def _call_end(self, out: list[OutputEvent]) -> State | None:
        ending, between = "}", self._between.strip()
        if self._separator == "{":  # the arguments may be written as JSON instead
            ending = between or "{}"
        elif "<" in between:  # a tag is damaged; what it stood for is not to be missed
            ending = between
        out.append(CallArguments(ending))
        self.ended = True
        return None

    def _find(self, tags: Iterable[str], start: int) -> tuple[int, str] | None:
        found = [(place, tag) for tag in tags if (place := self._buffer.find(tag, start)) >= 0]
        return min(found, default=None)

    def _last_tag(self, end: int) -> int:
        """Return where a text that may be a damaged closing tag begins; `end` if there is none."""
        start = self._buffer.rfind("</", max(0, end - len(self._tags.value_end) - 2), end)
        return end if start < 0 else start

    def _is_closing_tag(self, text: str) -> bool:
        """Return whether a text before another tag of the call is the closing tag, with a mistake."""
        return text.startswith("</") and SequenceMatcher(None, text, self._tags.value_end).ratio() >= SIMILAR

    def _before_line_breaks(self, end: int) -> int:
        """Return `end` without up to two line breaks before it, which may belong to the tags."""
        return end - (end - len(self._buffer[max(0, end - 2) : end].rstrip("\n")) - max(0, end - 2))

    def _put(self, out: list[OutputEvent], length: int) -> None:
        """Take this many characters of the value from the buffer."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._types != {"string"}:
            self._pieces_of_value.append(text)
        elif text:
            out.append(CallArguments(json.dumps(text, ensure_ascii=False)[1:-1]))

"""One tool call as Gemma 4 writes it: `call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.argument_types import argument_types, json_value
from deployments.openai.parsers.tools.call_reader import NAME, CallReader
from engine.text.detokenizer import start_of_possible

QUOTE, OPEN, CLOSE = '<|"|>', "<|tool_call>", "<tool_call|>"
_QUOTES = (QUOTE, '"', "'")
_KEY = re.compile(r"""\s*(?:<\|"\|>|["'])?(?P<key>[^\s"'<>{}\[\],:]+)(?:<\|"\|>|["'])?\s*:""")
_LITERAL = re.compile(r"(?i:true|false|null)|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_MAX_DEPTH = 100


class GemmaCall(CallReader):
    """Reads a function's name, then its arguments, which are emitted all at once."""

    end_marker = CLOSE

    def __init__(self, tools: Mapping[str, dict[str, Any]]):
        """tools: JSON schema of the arguments by function name."""
        super().__init__()
        self._tools = tools
        self._schema: dict[str, Any] = {}
        self._arguments: list[str] = []
        self._marker = ""  # with which the arguments may end

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head("{")
        if head is None:
            return self._lacks_head("{")
        found = re.fullmatch(rf"\s*(?:call)?:\s*({NAME})\s*", head)
        if found is None:
            return self._fail()
        self._schema = self._tools.get(found[1], {})
        self._begin(out, found[1])
        return self._body

    def _body(self, out: list[OutputEvent], final: bool) -> State | None:
        found = [(place, marker) for marker in (CLOSE, OPEN) if (place := self._buffer.find(marker)) >= 0]
        end, self._marker = min(found, default=(start_of_possible([CLOSE, OPEN], self._buffer), ""))
        self._arguments.append(self._buffer[:end])
        self._buffer = self._buffer[end + len(self._marker) :]
        if not found:
            return self._end(out) if final else None
        return self._in_text if "".join(self._arguments).count(QUOTE) % 2 else self._end(out)

    def _in_text(self, out: list[OutputEvent], final: bool) -> State | None:
        """Decide whether the marker stands inside of a text, or the text lacks its end."""
        found = [place for marker in (QUOTE, OPEN) if (place := self._buffer.find(marker)) >= 0]
        if not found and not final:
            return None
        if found and self._buffer.startswith(QUOTE, min(found)):
            self._arguments.append(self._marker)
            return self._body
        return self._end(out)

    def _end(self, out: list[OutputEvent]) -> State | None:
        written = "{" + "".join(self._arguments)
        try:
            found = None if self._cut and not self._marker else _Arguments(written, self._schema).read()
        except (ValueError, RecursionError):
            found = None
        out.append(CallArguments(written if found is None else found))
        self._buffer = (OPEN if self._marker == OPEN else "") + self._buffer
        self.ended = True
        return None


class _Arguments:
    """Reader of arguments. Texts stand between QUOTEs, or in other quotes, or have none; then they end before the next
    key or bracket."""

    def __init__(self, text: str, schema: dict[str, Any]):
        self._text, self._schema = text, schema
        self._at = 0

    def read(self) -> str:
        """Return the arguments as JSON. Raises ValueError for text that is none."""
        found = self._object(0)
        if self._text[self._at :].strip():
            raise ValueError("text follows the arguments")
        return found

    def _object(self, depth: int) -> str:
        members: list[str] = []
        self._at += 1
        while not self._ends("}"):
            key = _KEY.match(self._text, self._at)
            if key is None:
                raise ValueError("a key is missing")
            self._at = key.end()
            types = argument_types(self._schema, key["key"]) if self._knows(key["key"], depth) else None
            members.append(f"{json.dumps(key['key'], ensure_ascii=False)}:{self._value('}', depth, types)}")
        return "{" + ",".join(members) + "}"

    def _array(self, depth: int) -> str:
        entries: list[str] = []
        self._at += 1
        while not self._ends("]"):
            entries.append(self._value("]", depth, None))
        return "[" + ",".join(entries) + "]"

    def _knows(self, key: str, depth: int) -> bool:
        properties = self._schema.get("properties")
        return depth == 0 and isinstance(properties, dict) and key in properties

    def _ends(self, bracket: str) -> bool:
        """Skip what separates two entries. Returns whether there is none left."""
        while self._text[self._at : self._at + 1].isspace() or self._text.startswith(",", self._at):
            self._at += 1
        if self._at >= len(self._text):
            raise ValueError(f"{bracket} is missing")
        ended = self._text[self._at] == bracket
        self._at += ended
        return ended

    def _value(self, bracket: str, depth: int, types: frozenset[str] | None) -> str:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        if depth > _MAX_DEPTH:
            raise ValueError("too many brackets")
        if self._text.startswith("{", self._at):
            return self._object(depth + 1)
        if self._text.startswith("[", self._at):
            return self._array(depth + 1)
        for quote in _QUOTES:
            if self._text.startswith(quote, self._at) and (text := self._quoted(quote, bracket)) is not None:
                return json.dumps(text, ensure_ascii=False)
        text = self._bare(bracket, depth).strip()
        if "<|" in text or "|>" in text:
            raise ValueError("a marker is damaged")
        if types is not None:
            return json_value(text, types)
        return text.lower() if _LITERAL.fullmatch(text) else json.dumps(text, ensure_ascii=False)

    def _quoted(self, quote: str, bracket: str) -> str | None:
        """Take a text in quotes; return None if what follows is neither the next entry nor the end."""
        start = self._at + len(quote)
        end = self._text.find(quote, start)
        rest = self._text[end + len(quote) :].lstrip()[:1]
        if end < 0 or (quote != QUOTE and rest not in (",", bracket)):
            return None
        self._at = end + len(quote)
        return self._text[start:end]

    def _bare(self, bracket: str, depth: int) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] != bracket:
            if self._text[self._at] == "," and (bracket == "]" or self._is_key(self._at + 1, depth)):
                break
            if self._text[self._at] == "," and self._text[self._at + 1 :].lstrip().startswith(bracket):
                break
            self._at += 1
        return self._text[start : self._at]

    def _is_key(self, start: int, depth: int) -> bool:
        key = _KEY.match(self._text, start)
        return key is not None and (depth > 0 or not self._schema.get("properties") or self._knows(key["key"], depth))

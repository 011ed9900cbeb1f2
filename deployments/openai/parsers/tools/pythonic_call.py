"""One tool call written as a call in Python: `f(city="Paris", days=[1, 2])`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Container, Mapping
from typing import Any

import msgspec

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.call_reader import CallReader

_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_PLAIN = re.compile(r"""[^'"()\[\]{}\\]*""")
_SPREAD = re.compile(r"\s*\*\*\s*(?=\{)")
_KEYWORD = re.compile(r"\s*(?P<name>[\w$.-]+)\s*=\s*")
_BARE = re.compile(r"[\w.+-]+")
_ESCAPE = re.compile(
    r"""\\(\n|[\\'"abfnrtv]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00[01][0-9a-fA-F]{5}|N\{[^}]+\})"""
)
_PATH = re.compile(r"""(?:[A-Za-z]:|\\\\[\w.$-]+)(?:\\[^\\/:*?"<>|\n]+)+\\?""")
_IN_PATH = re.compile(r"(?<![A-Za-z])[A-Za-z]:\\(?!\\)")


class PythonicCall(CallReader):
    """Reads a call of one of `names` with keyword arguments that are literals, or `**` and a dictionary of them. The
    call is emitted all at once.

    Names may have characters and be words that Python does not allow. A quote ends a text if the next entry or a
    bracket follows, so that others of its kind, and line breaks, may stand inside. The last bracket may be missing.
    """

    def __init__(self, names: Container[str]):
        super().__init__()
        self._names = names
        self._name = ""
        self._open: list[str] = []  # the closing brackets that are due
        self._quote = ""
        self._length = 0  # characters before those in the buffer
        self._quoted_from = 0
        self._texts: dict[int, int] = {}  # start and end of each text

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head("(")
        if head is None:
            return self._lacks_head("(")
        self._name, self._length, self._open = head.strip(), len(head) + 1, [")"]
        return self._arguments if self._name in self._names else self._fail()

    def _take(self, length: int) -> None:
        self._buffer, self._length = self._buffer[length:], self._length + length

    def _arguments(self, out: list[OutputEvent], final: bool) -> State | None:
        text, at = self._buffer, 0
        while at < len(text):
            at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                break
            char = text[at]
            if self._quote or char in ("'", '"', "\\"):
                length = self._in_text(char, text, at, final)
                if length is None:
                    break
                at += length
            elif char in _CLOSERS:
                self._open.append(_CLOSERS[char])
                at += 1
            elif self._open == [")"]:
                self._take(at + (char == ")"))
                return self._complete(out, "" if char == ")" else ")") if char in ")]" else self._fail()
            elif char == self._open.pop():
                at += 1
            else:
                return self._fail()
        self._take(at)
        if final and not self._cut and not self._quote and self._open == [")"]:
            return self._complete(out, ")")
        return None

    def _in_text(self, char: str, text: str, at: int, final: bool) -> int | None:
        """Return how many characters to take from this place, which may begin or end a text; None if that needs more
        characters."""
        if char == "\\":
            return self._backslash(text, at, final)
        if self._quote and not text.startswith(self._quote[: len(text) - at], at):
            return 1
        if len(text) - at < len(self._quote):
            return 1 if final else None
        if not self._quote:
            if not final and len(text) - at < 3 and text[at:] == char * (len(text) - at):
                return None
            self._quote = char * 3 if text.startswith(char * 3, at) else char
            self._quoted_from = self._length + at
            return len(self._quote)
        length = len(self._quote)
        follower = text[at + length :].lstrip()[:1]
        if not final and not follower:
            return None
        if length == 3 or follower in (",", ")", "]", "}", ":", ""):
            self._texts[self._quoted_from] = self._length + at + length
            self._quote = ""
        return length

    def _backslash(self, text: str, at: int, final: bool) -> int | None:
        """Return how many characters to take: the next one too, unless this is the end of a path of Windows."""
        rest = text[at + 1 :]
        if not rest or (rest[0] == self._quote and not rest[1:].lstrip() and not final):
            return None
        ends = rest[0] == self._quote and rest[1:].lstrip()[:1] in (",", ")", "]", "}", "")
        path = (self.raw + text[:at])[self._quoted_from + 1 :] if ends else ""
        return 1 if _PATH.fullmatch(path) else 2

    def _complete(self, out: list[OutputEvent], missing: str) -> State | None:
        try:
            arguments = _Literals(self.raw + missing, self._texts).arguments(self.raw.index("(") + 1)
            encoded = msgspec.json.encode(arguments).decode()
        except (ValueError, TypeError, RecursionError):
            self.complete = True
            return self._fail()
        self._begin(out, self._name)
        out.append(CallArguments(encoded))
        self.ended = True
        return None


class _Literals:
    """Reader of literals. Raises ValueError for other text."""

    def __init__(self, text: str, texts: Mapping[int, int]):
        """texts: start and end of each text in quotes."""
        self._text, self._texts = text, texts
        self._at = 0

    def arguments(self, start: int) -> dict[str, Any]:
        self._at = start
        found: dict[str, Any] = {}
        while not self._ends(")"):
            if self._match(_SPREAD):
                found |= self._value()
                continue
            keyword = self._match(_KEYWORD)
            if keyword is None:
                raise ValueError("a keyword is missing")
            found[keyword["name"]] = self._value()
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def _ends(self, bracket: str) -> bool:
        """Skip a comma. Returns whether the bracket follows."""
        self._match(re.compile(r"\s*,?\s*"))
        ended = self._text[self._at] == bracket
        self._at += ended
        return ended

    def _value(self) -> Any:
        self._match(re.compile(r"\s*"))
        char = self._text[self._at]
        if char in ("[", "("):
            self._at += 1
            return self._items(_CLOSERS[char])
        if char == "{":
            self._at += 1
            return self._members()
        prefix = self._match(re.compile(r"[rRuUfF]?(?=['\"])"))
        if self._at in self._texts:
            return self._quoted(is_raw=prefix is not None and prefix[0] in ("r", "R"))
        bare = self._match(_BARE)
        if bare is None:
            raise ValueError("no literal")
        return _NAMES[bare[0]] if bare[0] in _NAMES else _number(bare[0])

    def _items(self, bracket: str) -> list[Any]:
        found = []
        while not self._ends(bracket):
            found.append(self._value())
        return found

    def _members(self) -> Any:
        """Read a dictionary, or a set as a list."""
        found, items = {}, []
        while not self._ends("}"):
            key = self._value()
            if self._match(re.compile(r"\s*:")):
                found[key if isinstance(key, str) else msgspec.json.encode(key).decode()] = self._value()
            else:
                items.append(key)
        if found and items:
            raise ValueError("a value is missing")
        return items or found

    def _quoted(self, *, is_raw: bool) -> str:
        start, end = self._at, self._texts[self._at]
        length = 3 if self._text.startswith(self._text[start] * 3, start) and end - start >= 6 else 1
        self._at = end
        text = self._text[start + length : end - length]
        return text if is_raw else _unescaped(text)


def _number(text: str) -> int | float:
    try:
        found = ast.literal_eval(text)
    except SyntaxError:
        found = int(text, 10)  # 07
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError("no number")
    return found


def _unescaped(text: str) -> str:
    """Replace escapes, except in paths of Windows whose backslashes are not escaped."""
    has_others = "\\" in _ESCAPE.sub("", text)
    if "\\" not in text or _PATH.fullmatch(text) or (has_others and _IN_PATH.search(text)):
        return text
    found = _ESCAPE.sub(_character, text)
    # escapes of two halves of one character
    return found.encode("utf-16", "surrogatepass").decode("utf-16") if re.search("[\ud800-\udfff]", found) else found


def _character(escape: re.Match[str]) -> str:
    try:
        return str(ast.literal_eval(f'"{escape[0]}"'))
    except (SyntaxError, ValueError):
        return escape[0]

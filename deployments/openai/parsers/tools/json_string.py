"""Strings of JSON as models write them, with line breaks and backslashes that JSON does not allow."""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_SO_FAR = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_DRIVE = re.compile(r"(^|[^A-Za-z])[A-Za-z]:$")


class JsonString:
    """Reads the text of one string after the other, and writes it as JSON.

    A control character is escaped, and so is a backslash that begins no escape. In a path of Windows (`C:\\Users\\new`)
    whose first backslash begins none, no other one does. If that one does, the rest stays as it is, since nobody knows
    what was meant.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.held = ""  # beginning of an escape
        self._tail = ""  # the last characters of the text
        self._mode = ""  # how backslashes are read, once there is one: any, path, or as_written

    def open(self) -> None:
        self.is_open, self.held, self._tail, self._mode = True, "", "", ""

    def read(self, text: str, start: int) -> tuple[str, str, int]:
        """Read up to the closing quote. Returns what is written, and the text with the place from which to go on."""
        out: list[str] = []
        while start < len(text) and self.is_open:
            char = text[start]
            if self.held:
                self.held, start = self.held + char, start + 1
                if _ESCAPE_SO_FAR.fullmatch(self.held):
                    continue
                if _ESCAPE.fullmatch(self.held):
                    out.append(self._escape(self.held))
                else:
                    out.append(self._no_escape())
                    text, start = self.held[1:] + text[start:], 0
                self.held = ""
                continue
            end = _PLAIN.match(text, start).end()  # type: ignore[union-attr]
            if end > start:
                out.append(text[start:end])
                self._tail = (self._tail + text[start:end])[-3:]
            elif char == "\\":
                self.held, end = char, start + 1
                self._mode = self._mode or ("path" if _DRIVE.search(self._tail) else "any")
            else:
                self.is_open, end = char != '"', start + 1
                out.append(json.dumps(char)[1:-1] if self.is_open else char)
            start = end
        return "".join(out), text, start

    def _escape(self, escape: str) -> str:
        if self._mode == "path":
            self._mode = "as_written"
        return "\\" + escape if self._mode == "raw" and escape[1] not in '"\\' else escape

    def _no_escape(self) -> str:
        if self._mode == "path":
            self._mode = "raw"
        return "\\" if self._mode == "as_written" else "\\\\"

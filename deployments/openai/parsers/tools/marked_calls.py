"""Outputs whose calls are between markers, with text around them."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.openai.parsers.output_parser import Content, OutputEvent, OutputParser, State
from deployments.openai.parsers.tools.call_reader import MAX_HEAD, CallReader
from engine.text.detokenizer import start_of_possible

MAX_SPACE = 64  # characters of white space that may belong to the markup

ToolSchemas = Mapping[str, dict[str, Any]]
"""JSON schema of the arguments by function name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkup:
    """Markup in which a model family writes calls."""

    opens: tuple[str, ...]
    """Markers that begin a call, or several calls if `call` or `separator` is set."""
    call: str = ""
    """Marker before each call."""
    closes: tuple[str, ...]
    """Markers of which any number may follow a call."""
    separator: str = ""
    """Character between two calls."""
    skipped: str = ""
    """Characters that may precede a call, besides white space."""
    reader: Callable[[str, ToolSchemas], CallReader]
    """Returns the reader of a call, given the start of its text and the tools."""
    inner: tuple[str, ...] = ()
    """Markers inside a call that may be special tokens."""

    @property
    def markers(self) -> list[str]:
        """Markers that can be single tokens, without single characters, which also occur inside other tokens."""
        return [marker for marker in (*self.opens, self.call, *self.inner, *self.closes) if len(marker) > 1]


class MarkedCallsParser(OutputParser):
    """Parses calls between markers. Other text is content; white space around calls is dropped.

    A call of a function that was not offered is reported as a call too, so that the client can tell the model of its
    mistake.
    """

    def __init__(self, markup: CallMarkup, tools: ToolSchemas):
        super().__init__()
        self._markup, self._tools = markup, tools
        self._openers = [*markup.opens, *((markup.call,) if markup.call else ())]
        self._skipped = ""  # skipped characters before the current call
        self._called = False
        self._call: CallReader

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        found = [(start, opener) for opener in self._openers if (start := self._buffer.find(opener)) >= 0]
        if found:
            start, opener = min(found)
            before = without_last_space(self._buffer[:start])
            self._skipped = self._buffer[len(before) : start + len(opener)]
            self._buffer = self._buffer[start + len(opener) :]
            if before:
                out.append(Content(before))
            return self._before_call if opener != self._markup.call else self._begin_call
        if final:
            ready = len(without_last_space(self._buffer) if self._called else self._buffer)
        else:
            ready = len(without_last_space(self._buffer[: start_of_possible(self._openers, self._buffer)]))
        if ready:
            out.append(Content(self._buffer[:ready]))
            self._buffer = self._buffer[ready:]
        return None

    def _before_call(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        space = len(self._buffer) - len(rest)
        again = next((opener for opener in self._markup.opens if rest.startswith(opener)), "")
        if again and space <= MAX_SPACE and len(self._skipped) <= MAX_HEAD:
            self._skipped += self._buffer[: space + len(again)]
            self._buffer = rest[len(again) :]
            return self._before_call
        if not final and space <= MAX_SPACE and any(opener.startswith(rest) for opener in self._markup.opens):
            return None
        rest = rest.lstrip(string.whitespace + self._markup.skipped)
        space = len(self._buffer) - len(rest)
        is_call = bool(rest) and rest.startswith(self._markup.call)
        if not final and space <= MAX_SPACE and not is_call and self._markup.call.startswith(rest):
            return None
        if not is_call or space > MAX_SPACE:
            return self._no_call(out)
        taken = space + len(self._markup.call)
        self._skipped += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        return self._begin_call

    def _begin_call(self, out: list[OutputEvent], final: bool) -> State | None:
        if not self._buffer and not final:
            return None
        self._call = self._markup.reader(self._buffer, self._tools)
        self._call.markers = (*self._openers, *self._markup.closes)
        return self._in_call

    def _in_call(self, out: list[OutputEvent], final: bool) -> State | None:
        out += self._call.read(self._buffer, final=final, cut=self._cut)
        self._buffer = ""
        if not self._call.ended:
            return None
        self._buffer = self._call.rest
        if not self._call.failed:
            self._called = True
            return self._after_call
        if self._call.complete and self._markup.separator:
            return self._after_bad_call
        return self._bad_call

    def _after_bad_call(self, out: list[OutputEvent], final: bool) -> State | None:
        """Go on with the next call of a list."""
        rest = self._buffer.lstrip()
        if not rest and not final and len(self._buffer) <= MAX_SPACE:
            return None
        if not rest.startswith(self._markup.separator):
            return self._bad_call
        out.append(Content(self._skipped + self._call.raw))
        self._skipped, self._buffer = self._markup.separator, rest[len(self._markup.separator) :]
        return self._before_call

    def _bad_call(self, out: list[OutputEvent], final: bool) -> State | None:
        if len(self._call.raw) <= MAX_HEAD:  # short enough that another call may begin inside it
            self._buffer = self._call.raw + self._buffer
        else:
            self._skipped += self._call.raw
        return self._no_call(out)

    def _no_call(self, out: list[OutputEvent]) -> State:
        out.append(Content(self._skipped))
        return self._start

    def _after_call(self, out: list[OutputEvent], final: bool) -> State | None:
        rest, separator = self._buffer.lstrip(), self._markup.separator
        if len(self._buffer) - len(rest) > MAX_SPACE:
            return self._start
        closing = rest.lstrip("}" + string.whitespace)  # models lose count of brackets
        for close in self._markup.closes:
            if closing.startswith(close):
                self._buffer = closing[len(close) :]
                return self._after_call
        if separator and rest.startswith(separator):
            self._skipped, self._buffer = separator, rest[len(separator) :]
            return self._before_call
        if not final and any(marker.startswith(closing) for marker in self._markup.closes):
            return None
        if not closing:
            self._buffer = ""
        return self._start


def without_last_space(text: str) -> str:
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]

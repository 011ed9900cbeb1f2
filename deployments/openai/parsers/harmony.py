"""Outputs of gpt-oss, in the Harmony format: messages in channels, with reasoning, content and tool calls.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>`; see https://developers.openai.com/cookbook/articles/openai-harmony.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Container

from deployments.openai.parsers.output_parser import (
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
    State,
)
from engine.text.detokenizer import start_of_possible

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = [START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS]
EXAMPLE = r"to=functions\.example_function"  # call of the example function as the chat template writes it
MAX_HEADER = 400  # characters


class HarmonyParser(OutputParser):
    """Parses messages. The channel `analysis`, and calls of tools that the server does not have, are reasoning; the
    rest is content. Consecutive messages of one kind are joined by a line break. Text outside messages is content."""

    def __init__(self, names: Container[str]):
        """names: functions that may also be called without the prefix `functions.`."""
        super().__init__()
        self._names = names
        self._kind: type[Reasoning] | type[Content] | str = Content  # kind of the message; for a call, the function
        self._is_new = True  # whether the message has no text yet
        self._seen: set[object] = set()  # kinds of the messages so far
        self._has_arguments = False
        self._consumed = 0
        self._reasoning_spans: list[tuple[int, int]] = []  # in characters
        self._token_offsets: list[int] = []

    def count_tokens(self, offsets: list[int]) -> None:
        """Record the tokens of a chunk, before `add` gets its text. offsets: as in TextChunk."""
        self._token_offsets += offsets

    @property
    def num_tokens(self) -> int:
        """Number of reasoning tokens, without markers."""
        offsets = self._token_offsets
        return sum(bisect_left(offsets, end) - bisect_left(offsets, start) for start, end in self._reasoning_spans)

    def _consume(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._consumed += length
        return text

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if not rest and (final or len(self._buffer) < MAX_HEADER):
            return None
        beginnings = (START, CHANNEL, "to=")
        is_header = any(rest.startswith(beginning) for beginning in beginnings)
        may_be_header = is_header or any(beginning.startswith(rest) for beginning in beginnings)
        end = self._buffer.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE)) if is_header else -1
        is_cut = any(0 <= self._buffer.find(marker) < (end if end >= 0 else math.inf) for marker in ENDS)
        end = -1 if is_cut else end
        if end < 0 and may_be_header and not (final or is_cut) and len(self._buffer) < MAX_HEADER + len(MESSAGE):
            return None
        self._kind, self._is_new, self._has_arguments = Content, True, False
        if end >= 0:
            self._kind = self._kind_of(self._consume(end + len(MESSAGE)))
            if isinstance(self._kind, str):
                out.append(CallStart(self._kind))
        elif is_header:  # a header whose end has not arrived
            marker = next(beginning for beginning in beginnings if rest.startswith(beginning))
            self._add(out, self._consume(len(self._buffer) - len(rest) + len(marker)), self._consumed)
        return self._message

    def _kind_of(self, header: str) -> type[Reasoning] | type[Content] | str:
        recipient = re.search(r"to=([^\s<]+)", header)
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            return name if name != recipient[1] or name in self._names else Reasoning
        return Reasoning if re.search(r"<\|channel\|>\s*analysis", header) else Content

    def _message(self, out: list[OutputEvent], final: bool) -> State | None:
        markers = [*ENDS, START, CHANNEL]
        found = [(end, marker) for marker in markers if (end := self._buffer.find(marker)) >= 0]
        possible = len(self._buffer) if final else start_of_possible(markers, self._buffer)
        end, marker = min(found, default=(possible, ""))
        start = self._consumed
        if text := self._consume(end):
            self._add(out, text, start)
        ended = found or (final and not self._cut)
        if ended and isinstance(self._kind, str) and not self._has_arguments:
            out.append(CallArguments("{}"))
        self._consume(len(marker) if marker in ENDS else 0)
        return self._start if found else None

    def _add(self, out: list[OutputEvent], text: str, start: int) -> None:
        if isinstance(self._kind, str):
            self._has_arguments = self._has_arguments or bool(text.strip())
            out.append(CallArguments(text))
            return
        if self._kind is Reasoning:
            if self._reasoning_spans and self._reasoning_spans[-1][1] == start:
                start, _ = self._reasoning_spans.pop()
            self._reasoning_spans.append((start, self._consumed))
        if self._is_new and self._kind in self._seen:
            text = "\n" + text
        self._seen.add(self._kind)
        self._is_new = False
        out.append(self._kind(text))

"""One tool call as Gemma 4 writes it: `call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>`."""

from __future__ import annotations

import json
import re

from deployments.openai.parsers.output_parser import CallArguments, OutputEvent, State
from deployments.openai.parsers.tools.call_reader import NAME, CallReader
from deployments.openai.parsers.tools.json_call import json_object

QUOTE, CLOSE = '<|"|>', "<tool_call|>"
_WORD = re.compile(r"([^\s{}\[\],:]+)(\s*:)?")


class GemmaCall(CallReader):
    """Reads a function's name, then its arguments, which are emitted all at once even in a stream."""

    end_marker = CLOSE

    def __init__(self, *, streaming: bool):
        super().__init__(streaming=streaming)
        self._arguments: list[str] = ["{"]

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        head = self._take_head("{")
        if head is None:
            return self._lacks_head("{")
        found = re.fullmatch(rf"\s*call:({NAME})", head)
        if found is None:
            return self._fail()
        self._begin(out, found[1])
        return self._body

    def _body(self, out: list[OutputEvent], final: bool) -> State | None:
        text, complete = self._take_until(CLOSE)
        self._arguments.append(text)
        if complete:
            arguments = _json("".join(self._arguments))
            if json_object(arguments) is None:
                if not self._streaming:
                    return self._fail()
                arguments = "".join(self._arguments)
            out.append(CallArguments(arguments))
            self.ended = True
        elif final and self._streaming:
            out.append(CallArguments("".join(self._arguments)))
        return None


def _json(text: str) -> str:
    """Convert arguments to JSON. Texts stand between QUOTEs; keys and most other values are words without quotes."""
    parts = text.split(QUOTE)
    parts[::2] = [_WORD.sub(_quoted, part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


def _quoted(word: re.Match[str]) -> str:
    is_literal = re.fullmatch(r"true|false|null|-?\d+(\.\d+)?([eE][+-]?\d+)?", word[1])
    return word[0] if is_literal and not word[2] else f"{json.dumps(word[1], ensure_ascii=False)}{word[2] or ''}"

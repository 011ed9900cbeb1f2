"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from deployments.openai.parsers.output_parser import Content, OutputEvent, OutputParser, State
from deployments.openai.parsers.partial_tool_call import PartialToolCall
from engine.text.detokenizer import start_of_possible

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(OutputParser):
    """Text before, between and after calls is content; white space around calls is dropped.

    A call of a function that was not offered is still a call: the client can tell the model so.
    """

    def __init__(self, *, streaming: bool):
        super().__init__()
        self._streaming = streaming
        self._space = ""  # before the current call
        self._called = False
        self._call = PartialToolCall(None, streaming=streaming)

    def _start(self, out: list[OutputEvent], final: bool) -> State | None:
        start = self._buffer.find(OPEN)
        if start >= 0:
            before = self._buffer[:start].rstrip()
            self._space = self._buffer[len(before) : start]
            self._buffer = self._buffer[start + len(OPEN) :]
            self._call = PartialToolCall(None, streaming=self._streaming)
            if before:
                out.append(Content(before))
            return self._in_call
        if not final:
            ready = len(self._buffer[: start_of_possible([OPEN], self._buffer)].rstrip())
        else:
            ready = len(self._buffer.rstrip()) if self._called else len(self._buffer)
        if ready:
            out.append(Content(self._buffer[:ready]))
            self._buffer = self._buffer[ready:]
        return None

    def _in_call(self, out: list[OutputEvent], final: bool) -> State | None:
        events, self._buffer = self._call.add(self._buffer, final)
        out += events
        if not self._call.ended:
            return None
        if self._call.failed:
            out.append(Content(self._space + OPEN + self._call.raw))
            return self._start
        self._called = True
        return self._after_call

    def _after_call(self, out: list[OutputEvent], final: bool) -> State | None:
        rest = self._buffer.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE and not final:
            return None
        if rest.startswith(CLOSE):
            self._buffer = rest.removeprefix(CLOSE)
        return self._start

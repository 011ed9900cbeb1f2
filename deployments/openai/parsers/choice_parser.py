"""The parser of one choice of a chat response: its text becomes reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from deployments.openai.parsers.hermes import HermesParser
from deployments.openai.parsers.json_calls import JsonCallsParser, NamedCallParser
from deployments.openai.parsers.output_parser import (
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
)
from deployments.openai.parsers.reasoning import ThinkParser
from deployments.openai.response_bodies import FinishReason
from engine.text.text_stream import TextChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The format of the output that answers one request."""

    tool_calls: str = "none"
    """A ToolCallParserName but auto; `json` for an array of calls; `named` for the arguments of the only tool."""
    tools: Collection[str] = field(default_factory=frozenset)
    """Names of the tools that may be called."""
    parallel: bool = True
    """Keep all calls, not only the first."""
    reasoning: bool = False
    """Look for reasoning."""
    reasoning_begun: bool = False
    """The prompt ends inside the reasoning."""
    include_reasoning: bool = True
    """Hand out the reasoning."""

    def call_parser(self, *, streaming: bool) -> OutputParser | None:
        match self.tool_calls:
            case "none":
                return None
            case "named":
                return NamedCallParser(next(iter(self.tools)))
            case "hermes":
                return HermesParser(streaming=streaming)
            case _:
                return JsonCallsParser(self.tools, streaming=streaming, forced=self.tool_calls == "json")


class ChoiceParser:
    """Chains the parsers of one choice. streaming: see PartialToolCall."""

    def __init__(self, output_format: OutputFormat, *, streaming: bool):
        self._output_format = output_format
        self._reasoning_parser = ThinkParser(opened=output_format.reasoning_begun) if output_format.reasoning else None
        self._call_parser = output_format.call_parser(streaming=streaming)
        self.num_tool_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning_parser is None else self._reasoning_parser.num_tokens

    def add(self, chunk: TextChunk) -> list[OutputEvent]:
        if self._reasoning_parser is not None:
            self._reasoning_parser.count_tokens(chunk.offsets)
        final = chunk.finish_reason is not None
        events: list[OutputEvent] = [Content(chunk.text)] if chunk.text else []
        for parser in (self._reasoning_parser, self._call_parser):
            if parser is not None:
                events = _parse_content(parser, events, final=final)
        return [event for event in events if self._keep(event)]

    def finish_reason(self, chunk: TextChunk) -> FinishReason | None:
        """Return the reason as OpenAI reports it: `stop` also after a call of the function that the request named."""
        called = self.num_tool_calls > 0 and self._output_format.tool_calls != "named"
        return "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason

    def _keep(self, event: OutputEvent) -> bool:
        """Count the tool calls, and return whether the client gets the event."""
        match event:
            case CallStart():
                self.num_tool_calls += 1
                return self._output_format.parallel or self.num_tool_calls == 1
            case CallArguments():
                return self._output_format.parallel or self.num_tool_calls == 1
            case Reasoning():
                return self._output_format.include_reasoning
            case _:
                return True


def _parse_content(parser: OutputParser, events: list[OutputEvent], *, final: bool) -> list[OutputEvent]:
    """Replace the content by the events that `parser` finds in it."""
    out: list[OutputEvent] = []
    for event in events:
        out += parser.add(event.text) if isinstance(event, Content) else [event]
    return out + parser.finish() if final else out

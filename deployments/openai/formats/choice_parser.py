"""Parser of one choice of a chat response, from text to reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.openai.formats.families import CALL_FORMATS, REASONING_FORMATS
from deployments.openai.parsers.harmony import HarmonyParser
from deployments.openai.parsers.output_parser import (
    CallArguments,
    CallStart,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
)
from deployments.openai.parsers.reasoning.think import CallsInReasoning, ThinkParser
from deployments.openai.parsers.tools.whole_calls import JsonCallsParser, NamedCallParser
from deployments.openai.response_bodies import FinishReason
from engine.text.text_stream import TextChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Expected format of the output of one request."""

    tool_calls: str = "none"
    """A ToolCallParserName except auto; `json` for an array of calls; `arguments` for the arguments of the only
    tool."""
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schemas of the arguments, by the names of the tools that may be called."""
    named: bool = False
    """Whether the request names the tool to call."""
    parallel: bool = True
    """Whether to keep all calls, not only the first."""
    reasoning: str = "none"
    """A ReasoningParserName except auto."""
    reasoning_begun: bool = False
    """Whether the prompt ends inside the reasoning."""
    include_reasoning: bool = True
    """Whether to return the reasoning."""
    id_length: int | None = None
    """Length of tool call ids, if the model's chat template requires one."""

    forced: bool = False
    """Whether a grammar enforces a call after the reasoning, so that none can come inside."""

    def reasoning_parser(self) -> ThinkParser | HarmonyParser | None:
        if self.reasoning == "none":
            return None
        tags, calls = REASONING_FORMATS[self.reasoning].tags, CALL_FORMATS.get(self.tool_calls)
        if tags is None:
            return HarmonyParser(self.tools)
        if self.forced or calls is None or calls.markup is None:
            return ThinkParser(tags, opened=self.reasoning_begun)
        return ThinkParser(tags, opened=self.reasoning_begun, calls=CallsInReasoning(calls.markup, self.tools))

    def call_parser(self) -> OutputParser | None:
        match self.tool_calls:
            case "none":
                return None
            case "arguments":
                return NamedCallParser(next(iter(self.tools)))
            case "json":
                return JsonCallsParser(self.tools, forced=True)
            case _:
                return CALL_FORMATS[self.tool_calls].parser(self.tools)


class ChoiceParser:
    """Chains the parsers of one choice."""

    def __init__(self, output_format: OutputFormat, *, call_ids: Iterator[str] | None = None):
        """call_ids: hexadecimal ids from which ids of tool calls are made; None for random ids."""
        self._output_format, self._call_ids = output_format, call_ids
        self._reasoning_parser = output_format.reasoning_parser()
        parsers = self._reasoning_parser, output_format.call_parser()
        self._parsers = [parser for parser in parsers if parser is not None]
        self.num_tool_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning_parser is None else self._reasoning_parser.num_tokens

    def add(self, chunk: TextChunk) -> list[OutputEvent]:
        if self._reasoning_parser is not None:
            self._reasoning_parser.count_tokens(chunk.offsets)
        events: list[OutputEvent] = [Content(chunk.text)] if chunk.text else []
        if not self._parsers:
            return events
        for parser in self._parsers:
            events = _parse_content(parser, events, chunk.finish_reason)
        return [self._with_id(event) for event in events if self._keep(event)]

    def finish_reason(self, chunk: TextChunk) -> FinishReason | None:
        """Return the reason as OpenAI reports it: `stop` even after a call if the request named the function."""
        called = self.num_tool_calls > 0 and not self._output_format.named
        return "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason

    def _with_id(self, event: OutputEvent) -> OutputEvent:
        length, ids = self._output_format.id_length, self._call_ids
        if not isinstance(event, CallStart) or (ids is None and length is None):
            return event
        digits = uuid.uuid4().hex if ids is None else next(ids)
        if length is not None:
            return CallStart(event.name, digits[:length])
        return CallStart(event.name, event.id or f"call_{digits[:24]}")

    def _keep(self, event: OutputEvent) -> bool:
        """Count tool calls. Returns whether the client gets the event."""
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


def _parse_content(parser: OutputParser, events: list[OutputEvent], finish_reason: str | None) -> list[OutputEvent]:
    """Replace content by the events that `parser` finds in it."""
    out: list[OutputEvent] = []
    for event in events:
        out += parser.add(event.text) if isinstance(event, Content) else [event]
    return out if finish_reason is None else out + parser.finish(cut=finish_reason == "length")

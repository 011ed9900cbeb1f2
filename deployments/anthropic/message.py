"""Response to a message request, complete or as events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from deployments.anthropic.response_bodies import (
    AnthropicMessage,
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    Stop,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
    Usage,
)
from deployments.openai.chat_output import ChatOutput, ChatOutputChunk, tool_call_id
from deployments.openai.parsers import output_parser
from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent, Reasoning

SIGNATURE = "unsigned"
"""Signature of all reasoning. It is never checked, but some clients send back only signed reasoning."""


@dataclass(slots=True)
class MessageResponse:
    """Runs the generation once, through either `full` or `events`."""

    message_id: str
    output: ChatOutput
    max_model_len: int
    """Maximum number of tokens of the prompt and the answer."""
    _index: int = field(default=-1, init=False)
    """Index of the newest content block, -1 before the first."""
    _block: Content | None = field(default=None, init=False)
    """The block that is open."""
    _called: bool = field(default=False, init=False)

    async def full(self) -> AnthropicMessage:
        """Run the generation and return the complete message."""
        message = self._message()
        arguments: dict[int, str] = {}  # JSON by index of the block
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case ContentBlockStart(content_block=block):
                        message.content.append(block)
                    case ContentBlockDelta(index, InputJsonDelta(text)):
                        arguments[index] = arguments.get(index, "") + text
                    case ContentBlockDelta(index, delta):
                        _extend(message.content[index], delta)
                    case MessageDelta(stop, usage):
                        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
                        message.usage = usage
        for index, text in arguments.items():
            block = message.content[index]
            assert isinstance(block, ToolUseContent)
            block.input = _input(text)
        return message

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the events of a stream. The first event waits for the first token, which brings the number of cached
        tokens."""
        async with aclosing(self.output.chunks()) as chunks:
            started = False
            async for chunk in chunks:
                if not started:
                    started = True
                    yield MessageStart(self._message())
                    yield Ping()
                for found in chunk.events:
                    for event in self._add(found):
                        yield event
                if chunk.finish_reason is not None:
                    for event in self._close():
                        yield event
                    yield MessageDelta(self._stop(chunk), Usage.of(self.output, ended=True))
                    yield MessageStop()

    def _message(self) -> AnthropicMessage:
        return AnthropicMessage(self.message_id, self.output.model, [], Usage.of(self.output))

    def _add(self, found: OutputEvent) -> Iterator[Event]:
        match found:
            case output_parser.Content(text):
                if not isinstance(self._block, TextContent):
                    yield from self._open(TextContent())
                yield ContentBlockDelta(self._index, TextDelta(text))
            case Reasoning(text):
                if not isinstance(self._block, ThinkingContent):
                    yield from self._open(ThinkingContent())
                yield ContentBlockDelta(self._index, ThinkingDelta(text))
            case CallStart(name, call_id):
                self._called = True
                yield from self._open(ToolUseContent(re.sub("^call_", "toolu_", call_id or tool_call_id()), name))
            case CallArguments(text):
                yield ContentBlockDelta(self._index, InputJsonDelta(text))

    def _open(self, block: Content) -> Iterator[Event]:
        yield from self._close()
        self._index, self._block = self._index + 1, block
        yield ContentBlockStart(self._index, block)

    def _close(self) -> Iterator[Event]:
        if self._block is not None:
            if isinstance(self._block, ThinkingContent):
                yield ContentBlockDelta(self._index, SignatureDelta(SIGNATURE))
            yield ContentBlockStop(self._index)
            self._block = None

    def _stop(self, chunk: ChatOutputChunk) -> Stop:
        reason: StopReason
        if chunk.finish_reason == "length":
            usage = self.output.usage
            is_full = usage.prompt_tokens + usage.completion_tokens >= self.max_model_len
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(chunk.stop_reason, str):
            return Stop("stop_sequence", chunk.stop_reason)
        else:
            reason = "tool_use" if self._called else "end_turn"
        return Stop(reason, None)


def _extend(block: Content, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> None:
    match block, delta:
        case TextContent(), TextDelta(text):
            block.text += text
        case ThinkingContent(), ThinkingDelta(text):
            block.thinking += text
        case ThinkingContent(), SignatureDelta(signature):
            block.signature = signature


def _input(arguments: str) -> dict[str, Any]:
    """Return the complete part of a call's arguments, as Anthropic's client does for streams."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

"""The response to a chat request, full or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET

from deployments.frontend.generation import Generation
from deployments.http.context import RequestContext
from deployments.openai.parsers.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputEvent, Reasoning
from deployments.openai.request_bodies import ChatBody
from deployments.openai.response_bodies import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ToolCallBody,
    ToolCallDelta,
    TopLogprob,
    UsageBody,
)
from engine.text.text_stream import TextChunk
from engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatResponse:
    """Runs the generation once, through either `full` or `chunks`."""

    body: ChatBody
    context: RequestContext
    model: str
    fingerprint: str | None
    generation: Generation
    tokenizer: Tokenizer
    output_format: OutputFormat
    parsers: list[ChoiceParser] = field(init=False)

    def __post_init__(self) -> None:
        self.parsers = [ChoiceParser(self.output_format, streaming=self.body.stream) for _ in range(self.body.n)]

    async def full(self) -> ChatCompletion:
        choices = [ChatChoice(i, ChatMessage(), None, None, None) for i in range(self.body.n)]
        async with aclosing(self.generation.chunks()) as chunks:
            async for chunk in chunks:
                choice, parser = choices[chunk.index], self.parsers[chunk.index]
                _extend(choice.message, parser.add(chunk))
                choice.finish_reason, choice.stop_reason = parser.finish_reason(chunk), chunk.stop_reason
                if (logprobs := self._logprobs(chunk)) is not None:
                    choice.logprobs = choice.logprobs or ChatLogprobs([])
                    choice.logprobs.content += logprobs.content
        for choice in choices:
            if choice.message.content is None and not choice.message.tool_calls and not choice.message.reasoning:
                choice.message.content = ""
        context, tier = self.context, self.body.served_tier
        answer = ChatCompletion(context.response_id, context.created, self.model, choices, self._usage())
        answer.system_fingerprint, answer.service_tier = self.fingerprint, UNSET if tier is None else tier
        return answer

    async def chunks(self) -> AsyncGenerator[ChatChunk]:
        """Yield chunks of all choices; the first of each carries the role."""
        options = self.body.stream_options
        started: set[int] = set()
        async with aclosing(self.generation.chunks()) as chunks:
            async for chunk in chunks:
                index, parser = chunk.index, self.parsers[chunk.index]
                if index not in started:
                    started.add(index)
                    yield self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])
                logprobs, num_tool_calls = self._logprobs(chunk), parser.num_tool_calls
                events = parser.add(chunk)
                if events or logprobs or chunk.finish_reason:
                    reason = parser.finish_reason(chunk)
                    delta = _delta(events, num_tool_calls)
                    yield self._chunk([ChatChunkChoice(index, delta, logprobs, reason, chunk.stop_reason)])
        if options and options.include_usage:
            yield self._chunk([], with_usage=True)

    def _chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool = False) -> ChatChunk:
        context, options = self.context, self.body.stream_options
        chunk = ChatChunk(context.response_id, context.created, self.model, choices, "chat.completion.chunk")
        if with_usage or (options and options.continuous_usage_stats):
            chunk.usage = self._usage()
        if choices and choices[-1].finish_reason:
            chunk.system_fingerprint, chunk.service_tier = self.fingerprint, self.body.served_tier
        return chunk

    def _usage(self) -> UsageBody:
        reasoning_tokens = sum(parser.reasoning_tokens for parser in self.parsers)
        return UsageBody.of(self.generation.usage, reasoning_tokens if self.output_format.reasoning else None)

    def _logprobs(self, chunk: TextChunk) -> ChatLogprobs | None:
        if not chunk.logprobs:
            return None
        content = []
        for entry in chunk.logprobs:
            token = self._top_logprob(entry.token_id, entry.logprob)
            top = [self._top_logprob(token_id, logprob) for token_id, logprob in entry.top]
            content.append(ChatTokenLogprob(token.token, token.logprob, token.bytes, top))
        return ChatLogprobs(content)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self.tokenizer.token_text(token_id), logprob, list(self.tokenizer.token_bytes(token_id)))


def _extend(message: ChatMessage, events: Iterable[OutputEvent]) -> None:
    for event in events:
        match event:
            case Content(text):
                message.content = (message.content or "") + text
            case Reasoning(text):
                message.reasoning = (message.reasoning or "") + text
            case CallStart(name):
                call = ToolCallBody(_tool_call_id(), CalledFunction(name, ""))
                message.tool_calls = [*(message.tool_calls or []), call]
            case CallArguments(text):
                assert message.tool_calls
                message.tool_calls[-1].function.arguments += text


def _delta(events: Iterable[OutputEvent], num_tool_calls: int) -> ChatDelta:
    """num_tool_calls: how many the choice had before these events."""
    delta, calls = ChatDelta(), []
    for event in events:
        match event:
            case Content(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning = (delta.reasoning or "") + text
            case CallStart(name):
                calls.append(ToolCallDelta(num_tool_calls, CalledFunctionDelta("", name), _tool_call_id(), "function"))
                num_tool_calls += 1
            case CallArguments(text):
                if not calls:
                    calls.append(ToolCallDelta(num_tool_calls - 1, CalledFunctionDelta("")))
                calls[-1].function.arguments += text
    delta.tool_calls = calls or None
    return delta


def _tool_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

"""Response to a chat request, complete or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, Raw

from deployments.http.context import RequestContext
from deployments.http.text_chunks import TextChunks
from deployments.openai.chat_body import ChatBody
from deployments.openai.chat_output import ChatOutput, tool_call_id
from deployments.openai.logprobs import prompt_logprobs
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, OutputEvent, Reasoning
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
    ToolCallBody,
    ToolCallDelta,
    UsageBody,
)
from engine.wire.token_delta import TokenLogprob


@dataclass(slots=True)
class ChatResponse:
    """Runs the generation once, through either `full` or `chunks`."""

    body: ChatBody
    context: RequestContext
    output: ChatOutput

    @property
    def ignored(self) -> list[str]:
        """Fields of the request that had no effect."""
        return self.output.ignored

    async def full(self) -> ChatCompletion:
        body = self.body
        choices = [ChatChoice(i, ChatMessage(body.echoed or None), None, None, None) for i in range(body.n)]
        prompt_entries: list[TokenLogprob | None] = []
        async with aclosing(self.output.chunks()) as chunks:
            async for chunk in chunks:
                choice = choices[chunk.index]
                _extend(choice.message, chunk.events)
                choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
                if body.return_token_ids:
                    choice.token_ids = (choice.token_ids or []) + chunk.token_ids
                prompt_entries = prompt_entries or chunk.prompt_logprobs or []
                if chunk.logprobs:
                    choice.logprobs = choice.logprobs or ChatLogprobs([])
                    choice.logprobs.content += chunk.logprobs
        for choice in choices:
            if choice.message.content is None and not choice.message.tool_calls and not choice.message.reasoning:
                choice.message.content = ""
        context = self.context
        answer = ChatCompletion(context.response_id, context.created, self.output.model, choices, self._usage())
        answer.system_fingerprint, answer.service_tier = self.output.fingerprint, self.output.service_tier
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self.output.tokenizer, prompt_entries, body.prompt_logprobs)
        if body.return_token_ids:
            answer.prompt_token_ids = self.output.prompt
        return answer

    async def chunks(self) -> AsyncGenerator[ChatChunk | Raw]:
        """Yield the chunks of all choices. The first of each choice carries the role."""
        options, with_ids = self.body.stream_options, self.body.return_token_ids
        more = with_ids or bool(options and options.continuous)
        texts, started = None if more else TextChunks(self._text_chunk), set[int]()
        async with aclosing(self.output.chunks()) as chunks:
            async for chunk in chunks:
                index = chunk.index
                if index not in started:
                    started.add(index)
                    role, later = ChatDelta(role="assistant", content=""), len(chunk.token_ids)
                    first = self._chunk([ChatChunkChoice(index, role)], later=later)
                    first.prompt_token_ids = self.output.prompt if with_ids and len(started) == 1 else None
                    first.prompt_text = None
                    yield first
                    if echoed := self.body.echoed:
                        yield self._chunk([ChatChunkChoice(index, ChatDelta(content=echoed))], later=later)
                if texts is not None and (text := chunk.only_text) is not None:
                    yield texts.encoded(index, text)
                elif chunk.events or chunk.logprobs or chunk.finish_reason or with_ids:
                    delta = _delta(chunk.events, chunk.num_tool_calls)
                    logprobs = ChatLogprobs(chunk.logprobs) if chunk.logprobs else None
                    choice = ChatChunkChoice(index, delta, logprobs, chunk.finish_reason, chunk.stop_reason)
                    if with_ids:
                        choice.token_ids = chunk.token_ids
                    yield self._chunk([choice])
        if (options and options.include_usage) or self.body.reports_cost:
            yield self._chunk([], with_usage=True)

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index, ChatDelta(content=text))])

    def _chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool = False, later: int = 0) -> ChatChunk:
        """later: tokens so far that later chunks bring."""
        context, options = self.context, self.body.stream_options
        chunk = ChatChunk(context.response_id, context.created, self.output.model, choices, "chat.completion.chunk")
        if with_usage or (options and options.continuous):
            chunk.usage = self._usage()
            chunk.usage.completion_tokens -= later
            chunk.usage.total_tokens -= later
        if choices and choices[-1].finish_reason:
            chunk.system_fingerprint, chunk.service_tier = self.output.fingerprint, self.output.service_tier
        return chunk

    def _usage(self) -> UsageBody:
        return UsageBody.of(self.output.usage, self.output.reasoning_tokens, with_cost=self.output.reports_cost)


def _extend(message: ChatMessage, events: Iterable[OutputEvent]) -> None:
    for event in events:
        match event:
            case Content(text):
                message.content = (message.content or "") + text
            case Reasoning(text):
                message.reasoning = (message.reasoning or "") + text
            case CallStart(name, call_id):
                call = ToolCallBody(call_id or tool_call_id(), CalledFunction(name, ""))
                message.tool_calls = [*(message.tool_calls or []), call]
            case CallArguments(text):
                assert message.tool_calls
                message.tool_calls[-1].function.arguments += text


def _delta(events: Iterable[OutputEvent], num_tool_calls: int) -> ChatDelta:
    """Return the delta of these events. num_tool_calls: number of tool calls in the choice before these events."""
    delta, calls = ChatDelta(), []
    for event in events:
        match event:
            case Content(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning = (delta.reasoning or "") + text
            case CallStart(name, call_id):
                function = CalledFunctionDelta("", name)
                calls.append(ToolCallDelta(num_tool_calls, function, call_id or tool_call_id(), "function"))
                num_tool_calls += 1
            case CallArguments(text):
                if not calls:
                    calls.append(ToolCallDelta(num_tool_calls - 1, CalledFunctionDelta("")))
                calls[-1].function.arguments += text
    delta.tool_calls = calls or UNSET
    return delta

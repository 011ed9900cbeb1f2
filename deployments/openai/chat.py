"""The answer to a chat request, whole or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from deployments.frontend.generation import Generation
from deployments.openai.parsers.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, Piece, Reasoning
from deployments.openai.requests import ChatBody
from deployments.openai.response_meta import ResponseMeta, usage_body
from deployments.openai.responses import (
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


class ChatAnswer:
    def __init__(
        self, header: ResponseMeta, body: ChatBody, generation: Generation, tokenizer: Tokenizer, form: OutputFormat
    ):
        self._header, self._body, self._generation, self._tokenizer = header, body, generation, tokenizer
        self._form = form
        self._readers: list[ChoiceParser] = []

    async def whole(self) -> ChatCompletion:
        self._readers = [ChoiceParser(self._form, early=False) for _ in range(self._body.n)]
        choices = [ChatChoice(i, ChatMessage(), None, None, None) for i in range(self._body.n)]
        async with aclosing(self._generation.chunks()) as parts:
            async for part in parts:
                choice, chunk, reader = choices[part.index], part.chunk, self._readers[part.index]
                _extend(choice.message, reader.add(chunk))
                choice.finish_reason, choice.stop_reason = reader.finish_reason(chunk), chunk.stop_reason
                if (logprobs := self._logprobs(chunk)) is not None:
                    choice.logprobs = choice.logprobs or ChatLogprobs([])
                    choice.logprobs.content += logprobs.content
        for choice in choices:
            if choice.message.content is None and not choice.message.tool_calls and not choice.message.reasoning:
                choice.message.content = ""
        return ChatCompletion(self._header.id, self._header.created, self._header.model, choices, self._usage())

    async def chunks(self) -> AsyncGenerator[ChatChunk]:
        """The first chunk of each choice carries the role."""
        self._readers = [ChoiceParser(self._form, early=True) for _ in range(self._body.n)]
        options = self._body.stream_options
        started: set[int] = set()
        async with aclosing(self._generation.chunks()) as parts:
            async for part in parts:
                index, chunk, reader = part.index, part.chunk, self._readers[part.index]
                if index not in started:
                    started.add(index)
                    yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
                logprobs, num_calls = self._logprobs(chunk), reader.num_calls
                pieces = reader.add(chunk)
                if pieces or logprobs or chunk.finish_reason:
                    reason = reader.finish_reason(chunk)
                    delta = _delta(pieces, num_calls)
                    yield self._chunk(ChatChunkChoice(index, delta, logprobs, reason, chunk.stop_reason))
        if options and options.include_usage:
            yield self._chunk(with_usage=True)

    def _chunk(self, *choices: ChatChunkChoice, with_usage: bool = False) -> ChatChunk:
        options = self._body.stream_options
        chunk = ChatChunk(
            self._header.id, self._header.created, self._header.model, list(choices), "chat.completion.chunk"
        )
        if with_usage or (options and options.continuous_usage_stats):
            chunk.usage = self._usage()
        return chunk

    def _usage(self) -> UsageBody:
        counts = [reader.reasoning_tokens for reader in self._readers]
        return usage_body(self._generation.usage, sum(counts) if self._form.reasoning else None)

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
        return TopLogprob(self._tokenizer.token_text(token_id), logprob, list(self._tokenizer.token_bytes(token_id)))


def _extend(message: ChatMessage, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        match piece:
            case Content(text):
                message.content = (message.content or "") + text
            case Reasoning(text):
                message.reasoning = (message.reasoning or "") + text
            case CallStart(name):
                call = ToolCallBody(_call_id(), CalledFunction(name, ""))
                message.tool_calls = [*(message.tool_calls or []), call]
            case CallArguments(text):
                assert message.tool_calls
                message.tool_calls[-1].function.arguments += text


def _delta(pieces: Iterable[Piece], num_calls: int) -> ChatDelta:
    """num_calls: of the choice, before these pieces."""
    delta, calls = ChatDelta(), []
    for piece in pieces:
        match piece:
            case Content(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning = (delta.reasoning or "") + text
            case CallStart(name):
                calls.append(ToolCallDelta(num_calls, CalledFunctionDelta("", name), _call_id(), "function"))
                num_calls += 1
            case CallArguments(text):
                if not calls:
                    calls.append(ToolCallDelta(num_calls - 1, CalledFunctionDelta("")))
                calls[-1].function.arguments += text
    delta.tool_calls = calls or None
    return delta


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

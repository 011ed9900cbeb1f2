"""The answer to a chat request, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.generation import Generation
from deployments.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    TopLogprob,
)
from deployments.openai.header import Header, usage_body
from deployments.openai.protocol import ChatBody
from engine.text_stream import TextChunk
from engine.tokenizer import Tokenizer


class ChatAnswer:
    def __init__(self, header: Header, body: ChatBody, generation: Generation, tokenizer: Tokenizer):
        self._header, self._body, self._generation, self._tokenizer = header, body, generation, tokenizer

    async def whole(self) -> ChatCompletion:
        choices = [ChatChoice(i, ChatMessage(content=""), None, None, None) for i in range(self._body.n)]
        async with aclosing(self._generation.parts()) as parts:
            async for part in parts:
                choice, chunk = choices[part.index], part.chunk
                choice.message.content += chunk.text
                choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
                if (logprobs := self._logprobs(chunk)) is not None:
                    choice.logprobs = choice.logprobs or ChatLogprobs([])
                    choice.logprobs.content += logprobs.content
        usage = usage_body(self._generation.usage)
        return ChatCompletion(self._header.id, self._header.created, self._header.model, choices, usage)

    async def chunks(self) -> AsyncGenerator[ChatChunk]:
        """The first chunk of each choice carries the role."""
        options = self._body.stream_options
        started: set[int] = set()
        async with aclosing(self._generation.parts()) as parts:
            async for part in parts:
                index, chunk = part.index, part.chunk
                if index not in started:
                    started.add(index)
                    yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
                logprobs = self._logprobs(chunk)
                if chunk.text or logprobs or chunk.finish_reason:
                    delta = ChatDelta(content=chunk.text) if chunk.text else ChatDelta()
                    choice = ChatChunkChoice(index, delta, logprobs, chunk.finish_reason, chunk.stop_reason)
                    yield self._chunk(choice)
        if options and options.include_usage:
            yield self._chunk(with_usage=True)

    def _chunk(self, *choices: ChatChunkChoice, with_usage: bool = False) -> ChatChunk:
        options = self._body.stream_options
        chunk = ChatChunk(
            self._header.id, self._header.created, self._header.model, list(choices), "chat.completion.chunk"
        )
        if with_usage or (options and options.continuous_usage_stats):
            chunk.usage = usage_body(self._generation.usage)
        return chunk

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

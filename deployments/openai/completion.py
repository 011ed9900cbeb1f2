"""Response to a text completion, complete or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import Raw

from deployments.http.context import RequestContext
from deployments.http.text_chunks import TextChunks
from deployments.jobs.source import Generation
from deployments.openai.completion_body import CompletionBody
from deployments.openai.logprobs import prompt_logprobs, token_name
from deployments.openai.response_bodies import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    UsageBody,
)
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.detokenizer import Detokenizer
from engine.text.text_stream import TextChunk
from engine.wire.token_delta import TokenLogprob


@dataclass(slots=True)
class CompletionResponse:
    """Runs the generation once, through either `full` or `chunks`. Choices are numbered prompt after prompt."""

    body: CompletionBody
    context: RequestContext
    model: str
    fingerprint: str | None
    generation: Generation
    tokenizer: ChatTokenizer
    prompts: list[list[int]]
    """Token ids."""
    texts: list[str]
    """Texts of the prompts, for `echo`."""
    ignored: list[str]
    """Fields of the request that had no effect."""
    service_tier: str | None
    """Tier at which the request is served; None if it names none."""
    started: set[int] = field(default_factory=set)
    """Indices of the choices that have had a chunk."""

    async def full(self) -> Completion:
        choices = [CompletionChoice(i, "", None, None, None) for i in range(len(self.prompts) * self.body.n)]
        async with aclosing(self.generation.chunks()) as chunks:
            async for chunk in chunks:
                choice = choices[chunk.index]
                more = self._choice(chunk)
                choice.text += more.text
                choice.finish_reason, choice.stop_reason = more.finish_reason, more.stop_reason
                if more.prompt_logprobs is not None:
                    choice.prompt_logprobs = more.prompt_logprobs
                if more.prompt_token_ids is not None:
                    choice.prompt_token_ids = more.prompt_token_ids
                if more.token_ids is not None:
                    choice.token_ids = [*(choice.token_ids or []), *more.token_ids]
                if choice.logprobs is None:
                    choice.logprobs = more.logprobs
                elif more.logprobs is not None:
                    _extend(choice.logprobs, more.logprobs)
        context = self.context
        answer = Completion(context.response_id, context.created, self.model, choices, self._usage())
        answer.system_fingerprint, answer.service_tier = self.fingerprint, self.service_tier
        return answer

    async def chunks(self) -> AsyncGenerator[CompletionChunk | Raw]:
        options = self.body.stream_options
        with_usage = bool(options and options.continuous)
        more = with_usage or self.body.echo or self.body.return_token_ids or self.body.logprobs is not None
        texts = None if more else TextChunks(self._text_chunk)
        async with aclosing(self.generation.chunks()) as chunks:
            async for chunk in chunks:
                if texts is not None and chunk.finish_reason is None:
                    if chunk.text:
                        yield texts.encoded(chunk.index, chunk.text)
                    continue
                choice = self._choice(chunk)
                if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids is not None:
                    yield self._chunk([choice], with_usage=with_usage)
        if (options and options.include_usage) or self.body.reports_cost:
            yield self._chunk([], with_usage=True)

    def _choice(self, chunk: TextChunk) -> CompletionChoice:
        index, logprobs = chunk.index, None
        first = index not in self.started
        self.started.add(index)
        prompt, prompt_text, text = self.prompts[index // self.body.n], self.texts[index // self.body.n], chunk.text
        shift = len(prompt_text) if self.body.echo else 0
        if self.body.logprobs is not None:
            logprobs = self._logprobs(chunk.logprobs or [], [shift + offset for offset in chunk.offsets])
        if self.body.echo_only:
            text = ""
            logprobs = logprobs and CompletionLogprobs([], [], [], [])
        if self.body.echo and first:
            text = prompt_text + text
            if logprobs is not None:
                logprobs = _extend(self._echoed_logprobs(prompt, chunk.prompt_logprobs or []), logprobs)
        choice = CompletionChoice(index, text, logprobs, chunk.finish_reason, chunk.stop_reason)
        if self.body.prompt_logprobs is not None and first:
            choice.prompt_logprobs = prompt_logprobs(
                self.tokenizer, chunk.prompt_logprobs or [], self.body.prompt_logprobs
            )
        if self.body.return_token_ids:
            choice.token_ids = [] if self.body.echo_only else chunk.token_ids
            choice.prompt_token_ids = prompt if first else None
        return choice

    def _echoed_logprobs(self, prompt: list[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        offsets = Detokenizer(self.tokenizer).add(prompt).offsets
        first = CompletionLogprobs([self._name(prompt[0])], [None], [None], offsets[:1])
        return _extend(first, self._logprobs(entries[1:], offsets[1:]))

    def _logprobs(self, entries: Sequence[TokenLogprob | None], offsets: list[int]) -> CompletionLogprobs:
        known = [entry for entry in entries if entry is not None]
        name, count = self._name, self.body.logprobs
        return CompletionLogprobs(
            tokens=[name(entry.token_id) for entry in known],
            token_logprobs=[entry.logprob for entry in known],
            top_logprobs=[
                {name(i): logprob for i, logprob in [*entry.top[:count], (entry.token_id, entry.logprob)]}
                for entry in known
            ],
            text_offset=offsets,
        )

    def _name(self, token_id: int) -> str:
        return token_name(self.tokenizer, token_id, self.body.return_tokens_as_token_ids)

    def _text_chunk(self, index: int, text: str) -> CompletionChunk:
        return self._chunk([CompletionChoice(index, text, None, None, None)], with_usage=False)

    def _chunk(self, choices: list[CompletionChoice], *, with_usage: bool) -> CompletionChunk:
        context = self.context
        chunk = CompletionChunk(context.response_id, context.created, self.model, choices, "text_completion")
        if choices and choices[-1].finish_reason:
            chunk.system_fingerprint, chunk.service_tier = self.fingerprint, self.service_tier
        if with_usage:
            chunk.usage = self._usage()
        return chunk

    def _usage(self) -> UsageBody:
        usage = UsageBody.of(self.generation.usage, with_cost=self.body.reports_cost)
        if self.body.echo_only:  # a token had to be computed, but is not part of the response
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.top_logprobs += more.top_logprobs
    logprobs.text_offset += more.text_offset
    return logprobs

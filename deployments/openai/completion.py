"""The response to a text completion, full or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET

from deployments.frontend.generation import Generation, SequenceChunk
from deployments.openai.requests import CompletionBody
from deployments.openai.response_meta import ResponseMeta, usage_body
from deployments.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import TokenLogprob


class CompletionResponse:
    """Choices are numbered prompt by prompt, `n` of each.

    prompts: token ids; texts: the same, as `echo` shows them.
    """

    def __init__(
        self,
        meta: ResponseMeta,
        body: CompletionBody,
        generation: Generation,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        texts: list[str],
    ):
        self._meta, self._body, self._generation, self._tokenizer = meta, body, generation, tokenizer
        self._prompts, self._texts = prompts, texts

    async def full(self) -> Completion:
        choices = [CompletionChoice(i, "", None, None, None) for i in range(len(self._prompts) * self._body.n)]
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                choice = choices[part.index]
                choice.text += part.text
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                if part.prompt_logprobs is not UNSET:
                    choice.prompt_logprobs = part.prompt_logprobs
                if part.prompt_token_ids is not UNSET:
                    choice.prompt_token_ids, choice.token_ids = part.prompt_token_ids, []
                if part.token_ids is not UNSET and choice.token_ids is not UNSET:
                    choice.token_ids += part.token_ids
                if choice.logprobs is None:
                    choice.logprobs = part.logprobs
                elif part.logprobs is not None:
                    _extend(choice.logprobs, part.logprobs)
        return self._completion(choices, with_usage=True)

    async def chunks(self) -> AsyncGenerator[Completion]:
        options = self._body.stream_options
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                if part.text or part.logprobs or part.finish_reason or (part.token_ids is not UNSET):
                    yield self._completion([part], with_usage=bool(options and options.continuous_usage_stats))
        if options and options.include_usage:
            yield self._completion([], with_usage=True)

    async def _choices(self) -> AsyncGenerator[CompletionChoice]:
        started: set[int] = set()
        async with aclosing(self._generation.chunks()) as parts:
            async for part in parts:
                first = part.index not in started
                started.add(part.index)
                yield self._choice(part, first=first)

    def _choice(self, part: SequenceChunk, *, first: bool) -> CompletionChoice:
        chunk, logprobs = part.chunk, None
        text, prompt_text = chunk.text, self._texts[part.index // self._body.n]
        shift = len(prompt_text) if self._body.echo else 0
        if self._body.logprobs is not None:
            logprobs = self._logprobs(chunk.logprobs or [], [shift + offset for offset in chunk.offsets])
        if self._body.echo_only:
            text = ""
            logprobs = logprobs and CompletionLogprobs([], [], [], [])
        if self._body.echo and first:
            text = prompt_text + text
            if logprobs is not None:
                logprobs = _extend(self._echoed_logprobs(part), logprobs)
        choice = CompletionChoice(part.index, text, logprobs, chunk.finish_reason, chunk.stop_reason)
        if self._body.prompt_logprobs is not None and first:
            choice.prompt_logprobs = self._prompt_logprobs(part, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice.token_ids = [] if self._body.echo_only else chunk.token_ids
            choice.prompt_token_ids = self._prompts[part.index // self._body.n] if first else UNSET
        return choice

    def _prompt_logprobs(self, part: SequenceChunk, count: int) -> PromptLogprobs:
        """By token id: `count` of the most likely tokens at each position, and the prompt's own."""
        text, found = self._tokenizer.token_text, PromptLogprobs()
        for entry in part.chunk.prompt_logprobs or []:
            if entry is None:
                found.append(None)
                continue
            top = {i: PromptLogprob(p, rank, text(i)) for rank, (i, p) in enumerate(entry.top[:count], 1)}
            found.append({entry.token_id: PromptLogprob(entry.logprob, entry.rank, text(entry.token_id)), **top})
        return found

    def _echoed_logprobs(self, part: SequenceChunk) -> CompletionLogprobs:
        prompt = self._prompts[part.index // self._body.n]
        offsets = Detokenizer(self._tokenizer).add(prompt).offsets
        found = self._logprobs((part.chunk.prompt_logprobs or [])[1:], offsets[1:])
        first = CompletionLogprobs([self._tokenizer.token_text(prompt[0])], [None], [None], offsets[:1])
        return _extend(first, found)

    def _logprobs(self, entries: Sequence[TokenLogprob | None], offsets: list[int]) -> CompletionLogprobs:
        known = [entry for entry in entries if entry is not None]
        text = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[text(entry.token_id) for entry in known],
            token_logprobs=[entry.logprob for entry in known],
            top_logprobs=[
                {
                    text(i): logprob
                    for i, logprob in [*entry.top[: self._body.logprobs], (entry.token_id, entry.logprob)]
                }
                for entry in known
            ],
            text_offset=offsets,
        )

    def _completion(self, choices: list[CompletionChoice], *, with_usage: bool) -> Completion:
        completion = Completion(self._meta.id, self._meta.created, self._meta.model, choices, "text_completion")
        if with_usage:
            completion.usage = usage_body(self._generation.usage)
            if self._body.echo_only:  # a token had to be computed, but is not part of the response
                completion.usage.completion_tokens = 0
                completion.usage.total_tokens = completion.usage.prompt_tokens
        return completion


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.top_logprobs += more.top_logprobs
    logprobs.text_offset += more.text_offset
    return logprobs

"""Output of a chat request as parsed events, from which each API builds its response."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from deployments.frontend.sequence import RequestUsage
from deployments.jobs.source import Generation
from deployments.openai.formats.choice_parser import ChoiceParser, OutputFormat
from deployments.openai.logprobs import token_name
from deployments.openai.parsers.output_parser import Content, OutputEvent
from deployments.openai.response_bodies import ChatTokenLogprob, FinishReason, TopLogprob
from engine.text.text_stream import TextChunk
from engine.text.tokenizer import Tokenizer
from engine.wire.token_delta import TokenLogprob


class ChatOutputChunk(msgspec.Struct, frozen=True):
    """Tokens that one step adds to one choice, as events. A msgspec struct, because a stream makes one per token."""

    index: int
    """The index of the choice."""
    events: list[OutputEvent]
    num_tool_calls: int
    """Number of tool calls of the choice before these events."""
    logprobs: list[ChatTokenLogprob]
    """Log-probabilities of all its tokens, tags included; empty unless requested."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    """Set in the first chunk of a choice, if requested."""

    @property
    def only_text(self) -> str | None:
        """The content, if the chunk contains nothing else; otherwise None."""
        if len(self.events) != 1 or self.logprobs or self.finish_reason is not None:
            return None
        event = self.events[0]
        return event.text if isinstance(event, Content) else None


@dataclass(slots=True)
class ChatOutput:
    """Output of one chat request. Iterating over `chunks` runs the generation, which is possible only once."""

    model: str
    """The name under which the model is served."""
    fingerprint: str | None
    generation: Generation
    tokenizer: Tokenizer
    output_format: OutputFormat
    num_choices: int
    hex_id: Callable[[str], str]
    """Returns the hexadecimal id of a named part of the answer, for ids of tool calls."""
    ignored: list[str]
    """Fields of the request that had no effect."""
    service_tier: str | None
    """Tier at which the request is served; None if it names none."""
    reports_cost: bool = False
    """Whether the usage includes what the request has cost."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by id."""
    parsers: list[ChoiceParser] = field(init=False)

    def __post_init__(self) -> None:
        self.parsers = [ChoiceParser(self.output_format, call_ids=self._call_ids(i)) for i in range(self.num_choices)]

    @property
    def prompt(self) -> list[int]:
        return self.generation.prompts[0]

    @property
    def usage(self) -> RequestUsage:
        """Token counts so far."""
        return self.generation.usage

    @property
    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens so far; None unless the model is known to reason."""
        if self.output_format.reasoning == "none":
            return None
        return sum(parser.reasoning_tokens for parser in self.parsers)

    async def chunks(self) -> AsyncGenerator[ChatOutputChunk]:
        """Yield the output of all choices as it arrives. Raises the errors of the generation."""
        async with aclosing(self.generation.chunks()) as chunks:
            async for chunk in chunks:
                parser = self.parsers[chunk.index]
                num_tool_calls, events = parser.num_tool_calls, parser.add(chunk)
                finish_reason = parser.finish_reason(chunk)
                yield ChatOutputChunk(
                    chunk.index,
                    events,
                    num_tool_calls,
                    self._logprobs(chunk),
                    finish_reason,
                    chunk.stop_reason,
                    chunk.token_ids,
                    chunk.prompt_logprobs,
                )

    def _call_ids(self, index: int) -> Iterator[str]:
        hex_id = self.hex_id  # not self: a cycle would leave the memory of images to the garbage collector
        return (hex_id(f"call {index} {i}") for i in itertools.count())

    def _logprobs(self, chunk: TextChunk) -> list[ChatTokenLogprob]:
        logprobs = []
        for entry in chunk.logprobs or []:
            token = self._top_logprob(entry.token_id, entry.logprob)
            top = [self._top_logprob(token_id, logprob) for token_id, logprob in entry.top]
            logprobs.append(ChatTokenLogprob(token.token, token.logprob, token.bytes, top))
        return logprobs

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        name = token_name(self.tokenizer, token_id, self.tokens_as_ids)
        return TopLogprob(name, logprob, list(self.tokenizer.token_bytes(token_id)))


def tool_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

"""Output of a job so far, for any number of readers that each follow it from the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Generic, TypeVar

import msgspec

from deployments.frontend.inboxes import joined
from deployments.frontend.sequence import RequestUsage
from deployments.frontend.sequence_context import SequenceContext
from deployments.jobs.event_ids import NoEventIds
from engine.text.text_stream import TextChunk, TextStream
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import PartRecord, told
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.costs import SequenceCost
from engine.wire.parts.speculation import Prediction, Verified
from engine.wire.token_delta import TokenDelta

T = TypeVar("T")


class Log(Generic[T]):
    """An append-only list of entries. Readers wait for more until `ended` is set."""

    def __init__(self) -> None:
        self.entries: list[T] = []
        self.ended = False
        self.error: BaseException | None = None
        """Error that ended the log, if any."""
        self._grown = asyncio.Event()  # replaced each time readers are woken

    def add(self, entry: T) -> None:
        self.entries.append(entry)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self.error = True, error
        self._wake()

    async def follow(self, start: int = 0) -> AsyncGenerator[T]:
        """Yield the entries from index `start` on, until the log has ended. Raises the log's error."""
        while True:
            while start < len(self.entries):
                start += 1
                yield self.entries[start - 1]
            if self.ended:
                break
            await self._grown.wait()
        if self.error is not None:
            raise self.error

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class DeltaLog(Log[tuple[int, TokenDelta]]):
    """Deltas of all choices in order of arrival, each with the index of its choice."""

    def outputs(self) -> list[TokenDelta]:
        """Return one delta per choice, merged and without fields that no client sees."""
        parts: dict[int, list[TokenDelta]] = {}
        for choice, delta in self.entries:
            parts.setdefault(choice, []).append(delta)
        return [stored(joined(parts[choice])) for choice in sorted(parts)]


class LoggedGeneration:
    """A Generation that a job computes or has computed: reads the job's log, and yields one token per chunk.

    So chunks, and the events made of them, depend only on the tokens and not on how the tokens arrived.
    """

    def __init__(
        self,
        frontend: SequenceContext,
        prompts: list[list[GenerateRequest]],
        log: DeltaLog,
        ids: NoEventIds,
    ):
        """ids: ids of the events made of the chunks."""
        self.prompts = [requests[0].prompt for requests in prompts]
        self.usage = RequestUsage(
            prompt_tokens=sum(map(len, self.prompts)),
            has_prediction=prompts[0][0].record(Prediction) is not None,
            prices=frontend.prices,
        )
        self._requests = [request for requests in prompts for request in requests]
        self._firsts = {id(requests[0]) for requests in prompts}
        self._frontend, self._log, self._ids = frontend, log, ids

    async def chunks(self) -> AsyncGenerator[TextChunk]:
        """Yield the chunks. Raises the error that ended the log, and AnswerDiverged."""
        texts = {i: TextStream(request.params, self._frontend.tokenizer, i) for i, request in enumerate(self._requests)}
        try:
            async for choice, delta in self._log.follow():
                for part in single_tokens(delta):
                    chunk = self._add(part, texts, choice)
                    if chunk is not None:
                        for ordered in self._ids.ordered(chunk):
                            yield ordered
                if not texts:
                    return
        except Exception as error:
            self._ids.fail(error)
            raise

    def _add(self, delta: TokenDelta, texts: dict[int, TextStream], choice: int) -> TextChunk | None:
        """Count a token, and return its chunk; None if its choice has already ended at a stop string."""
        chunk, num_tokens = None, 0
        for cost in delta.records(SequenceCost):
            self.usage.costs[str(choice)] = cost
        if choice in texts:
            chunk = texts[choice].add(delta)
            num_tokens = len(chunk.token_ids)
            self.usage.count_holds(choice, delta)
            if id(self._requests[choice]) in self._firsts:
                self.usage.cached_tokens += delta.num_cached_tokens
            self.usage.completion_tokens += num_tokens
            if chunk.finish_reason is not None:
                del texts[choice]
        self.usage.count_prediction(delta, num_tokens)
        return chunk


def stored(answer: TokenDelta) -> TokenDelta:
    """Return a whole answer as it is stored: with what clients see, and not with a record for each of its steps."""
    records: list[PartRecord] = [*answer.records(HoldOutcome), *answer.records(SequenceCost)[-1:]]
    if verified := answer.records(Verified):
        records.append(Verified.total(verified))
    return msgspec.structs.replace(
        answer, request_id="", times=None, num_preemptions=0, timeline=[], parts=told(records)
    )


def single_tokens(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Yield a delta token by token, then its end. A hidden stop token is part of the end."""
    tokens, replace = delta.token_ids, msgspec.structs.replace
    hides_last = delta.finish_reason == "stop" and not delta.text_complete
    num_apart = len(tokens) - hides_last if delta.finish_reason is not None else len(tokens)
    verified = delta.records(Verified)
    whole = Verified.total(verified)
    others = [(name, raw) for name, raw in delta.parts if name != Verified.__name__]
    for i in range(max(num_apart, 0)):
        yield replace(
            delta,
            position=delta.position + i,
            token_ids=tokens[i : i + 1],
            logprobs=None if delta.logprobs is None else delta.logprobs[i : i + 1],
            prompt_logprobs=None if i else delta.prompt_logprobs,
            num_cached_tokens=0 if i else delta.num_cached_tokens,
            parts=[*([] if i else others), *told([whole.at(i)] if verified else [])],
            finish_reason=None,
            stop_reason=None,
            text_complete=False,
        )
    if delta.finish_reason is None:
        return
    if num_apart <= 0:
        yield delta
        return
    yield replace(
        delta,
        position=delta.position + num_apart,
        token_ids=tokens[num_apart:],
        logprobs=None if delta.logprobs is None else delta.logprobs[num_apart:],
        prompt_logprobs=None,
        num_cached_tokens=0,
        parts=told([whole.at(num_apart)] if verified else []),
    )

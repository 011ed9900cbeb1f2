"""The tokens of an answer, kept so that any number of clients can read them from the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from deployments.frontend.sequence import Frontend, Usage
from deployments.frontend.token_channel import joined
from deployments.idempotency.position import EventIds
from engine.text.text_stream import TextChunk, TextStream
from engine.wire.messages import GenerateRequest, TokenDelta


class Tape:
    """Deltas of all choices, in the order in which they came."""

    def __init__(self, outputs: list[TokenDelta] | None = None):
        """outputs: of each choice, of an answer that is complete."""
        self.deltas = list(enumerate(outputs or []))
        self.ended = outputs is not None
        self.error: BaseException | None = None
        """Why no more will come."""
        self._grown = asyncio.Event()  # another one after each delta that somebody waits for

    def add(self, choice: int, delta: TokenDelta) -> None:
        self.deltas.append((choice, delta))
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self.error = True, error
        self._wake()

    async def grown(self) -> None:
        """Wait for more than there is now."""
        await self._grown.wait()

    def outputs(self) -> list[TokenDelta]:
        """Return one delta for each choice, with all that a client may see."""
        parts: dict[int, list[TokenDelta]] = {}
        for choice, delta in self.deltas:
            parts.setdefault(choice, []).append(delta)
        return [
            msgspec.structs.replace(joined(parts[choice]), request_id="", times=None, num_preemptions=0, timeline=[])
            for choice in sorted(parts)
        ]

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class TapedGeneration:
    """A Generation that another task runs, or ran: reads its tape."""

    def __init__(
        self, frontend: Frontend, prompts: list[list[GenerateRequest]], tape: Tape, ids: EventIds | None = None
    ):
        """ids: told of each group of tokens."""
        self.prompts = [requests[0].prompt for requests in prompts]
        self.usage = Usage(prompt_tokens=sum(map(len, self.prompts)), has_prediction=bool(prompts[0][0].prediction))
        self._requests = [request for requests in prompts for request in requests]
        self._firsts = {id(requests[0]) for requests in prompts}
        self._frontend, self._tape, self._ids = frontend, tape, ids

    async def chunks(self) -> AsyncGenerator[TextChunk]:
        """Raises what ended the tape, and AnswerDiverged."""
        try:
            async for chunk in self._chunks():
                yield chunk
        except Exception:
            if self._ids is not None:
                self._ids.fail()
            raise

    async def _chunks(self) -> AsyncGenerator[TextChunk]:
        texts = {i: TextStream(request.params, self._frontend.tokenizer, i) for i, request in enumerate(self._requests)}
        place, tape = 0, self._tape
        while texts:
            if place == len(tape.deltas):
                if tape.ended:
                    raise tape.error or AssertionError("a tape without an end")
                await tape.grown()
                continue
            deltas = tape.deltas[place : place + 1]
            place += 1
            for choice, part in deltas if self._ids is None else self._ids.regroup(*deltas[0]):
                if choice not in texts:
                    continue  # it has ended at a stop string
                chunk = texts[choice].add(part)
                if id(self._requests[choice]) in self._firsts:
                    self.usage.cached_tokens += part.num_cached_tokens
                self.usage.completion_tokens += len(chunk.token_ids)
                if part.prediction_tokens is not None:
                    self.usage.count_prediction(part.prediction_tokens, len(chunk.token_ids))
                if chunk.finish_reason is not None:
                    del texts[choice]
                if self._ids is not None:
                    self._ids.advance(chunk)
                yield chunk

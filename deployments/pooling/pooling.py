"""Prompts of one HTTP request that asks for vectors or scores."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from deployments.frontend.generation import LiveGeneration
from deployments.frontend.sequence import RequestUsage
from deployments.frontend.sequence_context import SequenceContext
from deployments.jobs.source import LiveSource
from deployments.pooling.shared_call import SharedCall
from engine.errors import RequestTimeout
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams

PART_PROMPTS, PART_TOKENS = 32, 8192
"""Maximum size of a part. It is admitted as a whole; other clients get their turns between parts."""
PARTS_PER_ENGINE = 4
"""Parts of one HTTP request per engine at a time: enough to keep the engine busy, but few enough not to delay other
requests for long."""


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """One prompt to pool, in a tenth of the memory of a list of its tokens."""

    tokens: array[int]
    params: PoolingParams


class Pooling:
    """Computes the prompts in parts, each of which passes admission separately."""

    def __init__(self, context: SequenceContext, request: GenerateRequest, client: str, source: LiveSource):
        """request: request with the fields that all prompts share. client: client to whom admission charges them."""
        self._context, self._request, self._client, self._source = context, request, client, source
        self._timeout_s = request.timeout_s or 0.0
        self._deadline_at = time.monotonic() + self._timeout_s
        self.usage = RequestUsage(prices=context.prices)
        """Of all prompts that were computed."""

    async def run(self, prompts: Sequence[PackedPrompt]) -> list[bytes]:
        """Return TokenDelta.answer of each prompt. Cancelling this aborts the prompts that are still running.

        Raises the first error of any prompt, and drops the others.
        """
        self.usage.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        results = [b""] * len(prompts)
        slots = asyncio.Semaphore(PARTS_PER_ENGINE * max(1, self._context.admission.num_engines))
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in parts([len(prompt.tokens) for prompt in prompts]):
                    await slots.acquire()
                    requests = [[self._request_of(i, prompts[i])] for i in part]
                    context = replace(self._context, pool=SharedCall(self._context.pool, len(part)))
                    generation = self._source.part(context, requests, self._client)
                    task = tasks.create_task(self._collect(generation, part, results))
                    task.add_done_callback(lambda _: slots.release())
                    await generation.admitted.wait()  # so that at most one part waits
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, RequestTimeout):  # state the request's limit: a part has only the rest of it
                error = RequestTimeout(self._request.request_id, self._timeout_s)
            raise error from None
        return results

    async def _collect(self, generation: LiveGeneration, part: Sequence[int], results: list[bytes]) -> None:
        async with aclosing(generation.chunks()) as chunks:
            async for chunk in chunks:
                results[part[chunk.index]] = chunk.answer
        self.usage.costs |= generation.usage.costs

    def _request_of(self, index: int, prompt: PackedPrompt) -> GenerateRequest:
        left_s = self._deadline_at - time.monotonic()
        if left_s <= 0:
            raise RequestTimeout(self._request.request_id, self._timeout_s)
        return msgspec.structs.replace(
            self._request,
            request_id=f"{self._request.request_id}-{index}",
            prompt=prompt.tokens.tolist(),
            timeout_s=left_s,
        ).asking(prompt.params)


def parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of all prompts, one part at a time, longest prompts first: engines compute adjacent prompts of
    one length together. lengths: prompt lengths in tokens."""
    part: list[int] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if part and (len(part) == PART_PROMPTS or tokens + lengths[i] > PART_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(i)
        tokens += lengths[i]
    if part:
        yield part

"""One model of the API, for embeddings and scores."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from deployments.http.context import RequestContext
from deployments.jobs.source import LiveSource
from deployments.openai.served.served_model import ServedModel
from deployments.pooling.pooling import PackedPrompt, Pooling
from deployments.pooling.request_bodies import (
    MAX_PAIR_CHARACTERS,
    EmbeddingBody,
    PairsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)
from deployments.pooling.response_bodies import (
    EmbeddingList,
    EmbeddingObject,
    PoolingUsage,
    RankedDocument,
    RankedText,
    Ranking,
    ScoreList,
    ScoreObject,
    VectorList,
    VectorObject,
)
from engine.errors import InvalidParameter, PromptTooLong, RequestError
from engine.pooling.prompts import PoolingPrompt, PoolingPrompts, refuse_instruction
from engine.wire.parts.pooling import PoolingParams, Task

TOKENIZED_AT_ONCE = 32
"""Texts per batch: the GIL is released while they are tokenized, but held while their tokens are handled."""

Input = TypeVar("Input", str, tuple[str, str], str | list[int])
Encode = Callable[[Sequence[Input], PoolingParams], list[PoolingPrompt]]


class PooledModel:
    def __init__(self, model: ServedModel):
        info = model.info
        self._model, self._info, self._tokenizer = model, info, model.tokenizer
        self._prompts = PoolingPrompts(model.tokenizer, info.supported_tasks, info.max_model_len)

    async def embed(self, body: EmbeddingBody, context: RequestContext) -> EmbeddingList:
        """Return embeddings. Raises RequestError, and Overloaded before any work is done."""
        params, inputs = body.pooling_params(), body.inputs()
        self._check("embed", params, body, context)
        encode = partial(self._prompts.embed, prompt_name=body.prompt_name, add_special_tokens=body.add_special_tokens)
        prompts = await self._tokenize(inputs, params, encode, "input" if len(inputs) == 1 else "input[{}]")
        vectors, usage = await self._pool(prompts, body, context)
        data = await asyncio.to_thread(_embeddings, vectors, body.encoding_format)
        return EmbeddingList(context.response_id, context.created, self._info.name, data, usage)

    async def pool(self, body: VectorBody, context: RequestContext) -> VectorList:
        """Return embeddings as vLLM's /pooling does. Raises the same errors as `embed`."""
        found = await self.embed(body, context)
        data = [VectorObject(entry.index, entry.embedding) for entry in found.data]
        return VectorList(found.id, found.created, found.model, data, found.usage)

    async def score(self, body: ScoreBody, context: RequestContext) -> ScoreList:
        """Return scores. Raises the same errors as `embed`."""
        queries, documents = body.texts()
        scores, usage = await self._scores(queries, documents, body, context)
        data = [ScoreObject(i, score) for i, score in enumerate(scores)]
        return ScoreList(context.response_id, context.created, self._info.name, data, usage)

    async def rerank(self, body: RerankBody, context: RequestContext) -> Ranking:
        """Return a ranking. Raises the same errors as `embed`."""
        documents = body.texts()
        scores, usage = await self._scores([body.query], documents, body, context)
        results = [RankedDocument(i, score) for i, score in enumerate(scores)]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        results = results[: body.top_n or None]
        if body.return_documents:
            for result in results:
                result.document = RankedText(documents[result.index])
        return Ranking(context.response_id, self._info.name, results, usage)

    async def _scores(
        self,
        queries: list[str],
        documents: list[str],
        body: PairsBody,
        context: RequestContext,
    ) -> tuple[list[float], PoolingUsage]:
        """Return a score for each document. queries: one per document, or one for all."""
        params, reads_pairs = body.pooling_params(), "score" in self._info.supported_tasks
        self._check("score" if reads_pairs else "embed", params, body, context)
        each = queries * (len(documents) // len(queries))
        if sum(map(len, [*each, *documents])) + len(documents) * len(body.instruction or "") > MAX_PAIR_CHARACTERS:
            limit = f"{MAX_PAIR_CHARACTERS} characters, with the query counted for each of them"
            raise RequestError(f"documents must have at most {limit}", "documents")
        if reads_pairs:
            pairs = list(zip(each, documents, strict=True))
            encode = partial(self._prompts.score, instruction=body.instruction)
            prompts = await self._tokenize(pairs, params, encode, "documents[{}]")
            numbers, usage = await self._pool(prompts, body, context)
            return [_floats(number).item() for number in numbers], usage
        refuse_instruction(body.instruction)
        params = msgspec.structs.replace(params, use_activation=True)
        name = "query" if isinstance(body, RerankBody) else "queries[{}]"
        prompts = await self._tokenize(queries, params, self._prompts.embed_queries, name)
        prompts += await self._tokenize(documents, params, self._prompts.embed_documents, "documents[{}]")
        pooled, usage = await self._pool(prompts, body, context)
        vectors = [_floats(vector) for vector in pooled]
        firsts, others = vectors[: len(queries)], vectors[len(queries) :]
        return [float(firsts[i % len(firsts)] @ other) for i, other in enumerate(others)], usage

    def _check(self, task: Task, params: PoolingParams, body: PoolingBody, context: RequestContext) -> None:
        """Raise RequestError or Overloaded for problems that can be found without looking at the texts."""
        self._info.supported_tasks.check(task, params.dimensions, f"model {self._info.name!r}")
        self._model.check_priority(body.priority)
        self._model.check_admission(context)

    async def _tokenize(
        self, texts: Sequence[Input], params: PoolingParams, encode: Encode[Input], name: str
    ) -> list[PackedPrompt]:
        """Tokenize the texts. name: field of a text, with `{}` for its index."""
        prompts: list[PackedPrompt] = []
        for start in range(0, len(texts), TOKENIZED_AT_ONCE):
            some = texts[start : start + TOKENIZED_AT_ONCE]
            names = [name.format(i) for i in range(start, start + len(some))]
            prompts += await self._model.in_thread(self._tokenize_some, some, params, encode, names)
        return prompts

    def _tokenize_some(
        self, texts: Sequence[Input], params: PoolingParams, encode: Encode[Input], names: list[str]
    ) -> list[PackedPrompt]:
        """Encode and pack the texts, in a worker thread. Raises RequestError, which names the text at fault."""
        limit, packed = self._info.max_model_len, []
        if params.truncate_prompt_tokens is None:
            for text, name in zip(texts, names, strict=True):
                for part in text if isinstance(text, tuple) else (text,):
                    if isinstance(part, str):
                        self._tokenizer.check_length(part, limit, answer=False, field=name)
        for prompt, name in zip(encode(texts, params), names, strict=True):
            ids = prompt.token_ids
            if len(ids) > limit:
                raise PromptTooLong(len(ids), limit, False, False, name)
            if not ids:
                raise InvalidParameter(name, "", "a text of at least one token")
            for token_id in (min(ids), max(ids)):
                if not 0 <= token_id < self._info.vocab_size:
                    raise InvalidParameter(name, token_id, f"token ids from 0 to {self._info.vocab_size - 1}")
            packed.append(PackedPrompt(array("i", ids), prompt.params))
        return packed

    async def _pool(
        self, prompts: Sequence[PackedPrompt], body: PoolingBody, context: RequestContext
    ) -> tuple[list[bytes], PoolingUsage]:
        request = self._model.new_request(context, body.priority, body.cache_salt)
        assert isinstance(context.source, LiveSource), "embeddings and scores are not kept"
        pooling = Pooling(self._model.frontend, request, context.client, context.source)
        self._model.check_prompts(sum(len(prompt.tokens) for prompt in prompts))
        pooled = await pooling.run(prompts)
        return pooled, PoolingUsage.of(pooling.usage, with_cost=body.reports_cost)


def _embeddings(vectors: Sequence[bytes], encoding_format: str) -> list[EmbeddingObject]:
    """Encode vectors as JSON, one at a time so that the event loop can run in between. Meant for a worker thread."""

    def encoded(vector: bytes) -> Any:
        if encoding_format == "base64":
            return base64.b64encode(vector).decode()
        return msgspec.Raw(msgspec.json.encode(_floats(vector).tolist()))

    return [EmbeddingObject(i, encoded(vector)) for i, vector in enumerate(vectors)]


def _floats(pooled: bytes) -> np.ndarray:
    return np.frombuffer(pooled, dtype="<f4")

"""One model of the API, for embeddings, classes and scores."""

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
    ClassifyBody,
    EmbeddingBody,
    PairsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TextsBody,
    VectorBody,
)
from deployments.pooling.response_bodies import (
    ClassList,
    ClassObject,
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
from engine.wire.parts.pooling import PoolingParams, PoolingTask

TOKENIZED_AT_ONCE = 32
"""Texts per batch: the GIL is released while they are tokenized, but held while their tokens are handled."""
MAX_NUMBERS = 2**24
"""Limit of the numbers for all tokens of a request: 64 MiB in float32, and some five times as much in JSON."""

TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_classify")
"""Tasks of /pooling if the request names none: the first that the model can do."""

Input = TypeVar("Input", str, tuple[str, str], str | list[int])
Encode = Callable[[Sequence[Input], PoolingParams], list[PoolingPrompt]]


class PooledModel:
    def __init__(self, model: ServedModel):
        info = model.info
        self._model, self._info, self._tokenizer = model, info, model.tokenizer
        self._prompts = PoolingPrompts(model.tokenizer, info.supported_tasks, info.max_model_len)

    async def embed(self, body: EmbeddingBody, context: RequestContext) -> EmbeddingList:
        """Return embeddings. Raises RequestError, and Overloaded before any work is done."""
        vectors, usage = await self._numbers("embed", body, context)
        numbers = await asyncio.to_thread(_encoded, vectors, body.encoding_format)
        data = [EmbeddingObject(i, each) for i, each in enumerate(numbers)]
        return EmbeddingList(context.response_id, context.created, self._info.name, data, usage)

    async def pool(self, body: VectorBody, context: RequestContext) -> VectorList:
        """Return the numbers of texts, or of their tokens. Raises the same errors as `embed`."""
        usual = next((one for one in TASKS if one in self._info.supported_tasks), TASKS[0])
        vectors, usage = await self._numbers(body.task or usual, body, context)
        numbers = await asyncio.to_thread(_encoded, vectors, body.encoding_format)
        data = [VectorObject(i, each) for i, each in enumerate(numbers)]
        return VectorList(context.response_id, context.created, self._info.name, data, usage)

    async def classify(self, body: ClassifyBody, context: RequestContext) -> ClassList:
        """Return the classes of texts. Raises the same errors as `embed`."""
        labels = self._info.supported_tasks.labels
        found, usage = await self._numbers("classify", body, context)
        data = [ClassObject(i, labels[probs.argmax()], probs.tolist(), len(probs)) for i, probs in enumerate(found)]
        return ClassList(context.response_id, context.created, self._info.name, data, usage)

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

    async def _numbers(
        self, task: PoolingTask, body: TextsBody, context: RequestContext
    ) -> tuple[list[np.ndarray], PoolingUsage]:
        """Return the numbers of each text: [size], or [tokens, size] for a task of tokens."""
        params, inputs = body.pooling_params().asking(task), body.inputs()
        self._check(task, params, body, context)
        encode = partial(
            self._prompts.of_texts, prompt_name=body.prompt_name, add_special_tokens=body.add_special_tokens
        )
        prompts = await self._tokenize(inputs, params, encode, "input" if len(inputs) == 1 else "input[{}]")
        size = 0
        if params.of_tokens:
            tasks = self._info.supported_tasks
            size = len(tasks.labels) if task == "token_classify" else params.dimensions or tasks.embedding_size
            _check_numbers(sum(len(prompt.tokens) for prompt in prompts), size)
        pooled, usage = await self._pool(prompts, body, context)
        vectors = [_floats(each) for each in pooled]
        return [each.reshape(-1, size) if size else each for each in vectors], usage

    async def _scores(
        self,
        queries: list[str],
        documents: list[str],
        body: PairsBody,
        context: RequestContext,
    ) -> tuple[list[float], PoolingUsage]:
        """Return a score for each document. queries: one per document, or one for all."""
        params, reads_pairs = body.pooling_params(), "score" in self._info.supported_tasks
        compares = not reads_pairs and "embed" in self._info.supported_tasks
        self._check("embed" if compares else "score", params, body, context)
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
        prompts = await self._tokenize(queries, params, self._prompts.of_queries, name)
        prompts += await self._tokenize(documents, params, self._prompts.of_documents, "documents[{}]")
        pooled, usage = await self._pool(prompts, body, context)
        vectors = [_floats(vector) for vector in pooled]
        firsts, others = vectors[: len(queries)], vectors[len(queries) :]
        return [float(firsts[i % len(firsts)] @ other) for i, other in enumerate(others)], usage

    def _check(self, task: PoolingTask, params: PoolingParams, body: PoolingBody, context: RequestContext) -> None:
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


def _check_numbers(tokens: int, size: int) -> None:
    """Raise RequestError if an answer with `size` numbers for each token would be too large."""
    if tokens * size > MAX_NUMBERS:
        limit = f"at most {MAX_NUMBERS // size} tokens together, because each has {size} numbers in the answer"
        raise RequestError(f"input must have {limit}, got {tokens}", "input")


def _encoded(vectors: Sequence[np.ndarray], encoding_format: str) -> list[Any]:
    """Encode vectors as JSON, one at a time so that the event loop can run in between. Meant for a worker thread."""
    if encoding_format == "base64":
        return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    return [msgspec.Raw(msgspec.json.encode(vector.tolist())) for vector in vectors]


def _floats(pooled: bytes) -> np.ndarray:
    return np.frombuffer(pooled, dtype="<f4")

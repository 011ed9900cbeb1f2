"""Embeddings, classes and scores of the offline API."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.scheduler import NOT_FINITE
from engine.errors import EngineError, InvalidParameter, RequestError
from engine.offline.adapters import LoRARequests, adapter_of, with_digests
from engine.offline.interrupts import held_interrupts
from engine.offline.lora_request import LoRARequest
from engine.offline.outputs import ScoringOutput, ScoringRequestOutput
from engine.offline.progress_bar import progress_bar
from engine.offline.prompts import ParsedPrompt
from engine.pooling.prompts import PoolingPrompt, PoolingPrompts, refuse_instruction
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams, PoolingTask, SupportedTasks
from engine.wire.token_delta import TokenDelta

if TYPE_CHECKING:
    from engine.offline.engine_group import EngineGroup

Pooled = tuple[str, list[int], np.ndarray, int]
"""A request's id, its prompt, its numbers float32 ([size], or for a task of tokens [tokens, size]), and how many of its
tokens came from the prefix cache."""


class OfflinePooling:
    """Computes embeddings, classes and scores with an engine, which runs nothing else meanwhile."""

    def __init__(
        self,
        core: EngineCore | EngineGroup,
        config: EngineConfig,
        tokenizer: ChatTokenizer,
        tasks: SupportedTasks,
        numbers: Iterator[int],
    ):
        """numbers: numbers of requests, unique in the engine."""
        self._core, self._config, self._tokenizer, self._tasks = core, config, tokenizer, tasks
        self._numbers = numbers

    def pool(
        self,
        task: PoolingTask,
        prompts: list[ParsedPrompt],
        params: PoolingParams,
        prompt_name: str | None,
        use_tqdm: bool,
        lora_request: LoRARequests,
    ) -> list[Pooled]:
        """Return the numbers of each prompt. Raises RequestError or EngineError. task: any but `score`."""
        if any(prompt.images for prompt in prompts):
            raise RequestError("prompts: multi_modal_data is not supported: models pool only texts", "prompts")
        params = params.asking(task)
        jobs = self._prompts().of_texts([prompt.content for prompt in prompts], params, prompt_name)
        salts = [prompt.cache_salt for prompt in prompts]
        return [
            (
                delta.request_id,
                job.token_ids,
                _floats(delta).reshape(len(job.token_ids), -1) if params.of_tokens else _floats(delta),
                delta.num_cached_tokens,
            )
            for job, delta in zip(jobs, self._pool(jobs, use_tqdm, lora_request, salts), strict=True)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        params: PoolingParams,
        instruction: str | None,
        use_tqdm: bool,
        lora_request: LoRARequest | None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document for the query, or for its own. Raises RequestError or EngineError."""
        queries, documents = _texts("data_1", queries), _texts("data_2", documents)
        if len(queries) not in (1, len(documents)):
            message = f"data_1 has {len(queries)} entries for {len(documents)} of data_2; it must have 1 or as many"
            raise RequestError(message, "data_1")
        if "score" in self._tasks:
            pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
            jobs = self._prompts().score(pairs, params, instruction)
            deltas = self._pool(jobs, use_tqdm, lora_request)
            scores = [_floats(delta).item() for delta in deltas]
        else:
            self._tasks.check("embed" if "embed" in self._tasks else "score")
            refuse_instruction(instruction)
            params = msgspec.structs.replace(params.asking("embed"), use_activation=True)
            prompts = self._prompts()
            jobs = [*prompts.of_queries(queries, params), *prompts.of_documents(documents, params)]
            both, count = self._pool(jobs, use_tqdm, lora_request), len(queries)
            deltas, vectors = both[count:], [_floats(delta) for delta in both]
            order = [i if count > 1 else 0 for i in range(len(documents))]  # of each document's query
            scores = [float(vectors[q] @ vector) for q, vector in zip(order, vectors[count:], strict=True)]
            jobs = [
                PoolingPrompt(jobs[q].token_ids + job.token_ids, job.params)
                for q, job in zip(order, jobs[count:], strict=True)
            ]
        return [
            ScoringRequestOutput(delta.request_id, job.token_ids, ScoringOutput(score), delta.num_cached_tokens)
            for job, delta, score in zip(jobs, deltas, scores, strict=True)
        ]

    def _prompts(self) -> PoolingPrompts:
        return PoolingPrompts(self._tokenizer, self._tasks, self._core.max_model_len)

    def _pool(
        self, jobs: list[PoolingPrompt], use_tqdm: bool, lora_requests: LoRARequests, salts: Sequence[str] = ()
    ) -> list[TokenDelta]:
        """Compute the jobs. Returns their deltas in order. Raises RequestError or EngineError, after aborting
        all jobs. salts: of the prefix cache, one for each job."""
        requests = [
            GenerateRequest(
                request_id=f"{self._config.seed}-{next(self._numbers)}",
                prompt=job.token_ids,
                cache_salt=salt,
            ).asking(job.params, adapter_of(lora))
            for job, lora, salt in zip(
                jobs, with_digests(lora_requests, len(jobs)), salts or [""] * len(jobs), strict=True
            )
        ]
        for request in requests:
            self._core.check(request)
        ended: dict[str, TokenDelta] = {}
        live: set[str] = set()
        room = 2 * self._config.slots
        # sorted by length, because an encoder computes requests of equal length together
        queue = iter(sorted(requests, key=lambda request: len(request.prompt), reverse=True))
        with progress_bar(use_tqdm) as bar:
            task = bar.add_task("pooling", total=len(requests), speed="")
            try:
                while len(ended) < len(requests):
                    with held_interrupts():
                        for request in itertools.islice(queue, room - len(live)):
                            self._core.add(request)
                            live.add(request.request_id)
                        events = self._core.step()
                    for event in events:
                        if event.delta.error is not None:
                            raise EngineError(event.delta.request_id, NOT_FINITE)  # the only one
                        ended[event.delta.request_id] = event.delta
                        live.discard(event.delta.request_id)
                        bar.advance(task)
            finally:
                with held_interrupts():
                    for request_id in live:  # the caller gave up, or a step failed: leave nothing behind
                        self._core.abort(request_id)
        return [ended[request.request_id] for request in requests]


def _floats(delta: TokenDelta) -> np.ndarray:
    return np.frombuffer(delta.answer, dtype="<f4")


def _texts(argument: str, given: str | Sequence[str]) -> list[str]:
    """Return one text or several as a list. Raises InvalidParameter."""
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise InvalidParameter(argument, text, "a text or a list of texts")
    return texts

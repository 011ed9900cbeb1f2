"""Offline inference: `from manta import LLM, SamplingParams`."""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config import GPU_DEFAULTS, EngineConfig
from engine.core.build import build_engine
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.core.scheduler import NOT_FINITE
from engine.device import is_gpu
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.tp_group import TPGroup, group_options
from engine.errors import Described, EngineError, InvalidParameter, RequestError
from engine.model.checkpoint.overlay import engine_folder
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.stage import check_stages
from engine.offline.adapters import LoRARequests, with_digests
from engine.offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from engine.offline.rank_processes import RENDEZVOUS_TIMEOUT_S, RankProcesses
from engine.pooling.prompts import PoolingPrompt, PoolingPrompts, refuse_instruction
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.lora import LoRARequest
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.pooling_params import PoolingParams
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenDelta

if TYPE_CHECKING:
    from engine.multimodal.processor import ImageProcessor
    from engine.offline.engine_group import Answer, EngineGroup


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids, with the images that placeholders among them stand for."""

    token_ids: list[int]
    mm_features: list[MultiModalFeatureSpec]


Prompt = str | list[int]
Message = dict[str, Any]


@dataclass(slots=True)
class _Sequence:
    """One unfinished sequence: the request it belongs to, and its text so far."""

    parent: RequestOutput
    output: CompletionOutput
    text: TextStream


class LLM:
    """One engine in this process; with `tensor_parallel` or `pipeline_parallel`, the other ranks are child processes.
    With `data_parallel`, the other engines are child processes, and requests are spread over all of them.

    >>> llm = LLM("pocket")
    >>> llm.chat([{"role": "user", "content": "What is an ocean?"}])[0].outputs[0].text

    options: fields of EngineConfig (dtype, max_model_len, max_num_seqs, ...).
    Raises StartupError if the model cannot be loaded. Not thread-safe: use it from one thread at a time.
    """

    def __init__(self, model: str = "pocket", **options: Any):
        # with a single client there is no need to keep the queue short
        options = {"model": str(model), "max_waiting": sys.maxsize, **options}
        if is_gpu(options.get("device", "auto")):
            options = GPU_DEFAULTS | options
        self.config = EngineConfig(**options)
        folder = engine_folder(self.config)
        self._model_config = ModelConfig.from_folder(folder, language_model_only=self.config.language_model_only)
        self._model_config.kv_heads_per_rank(self.config.tensor_parallel)  # raises before processes are started
        check_stages(self.config, self._model_config)
        check_experts(self.config, self._model_config)
        self.tokenizer = Tokenizer.from_folder(folder, decodes="generate" in self._model_config.supported_tasks)
        self._image_processor: ImageProcessor | None = None
        self._ranks: RankProcesses | None = None
        self._core = self._start()
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's thread and the other ranks. Memory is freed with the object."""
        _close(self._core, self._ranks)

    def _start(self) -> EngineCore | EngineGroup:
        if self.config.world_size == 1:
            return build_engine(self.config)
        group = TPGroup.listen(self.config.world_size, key=ClusterKey.generate(), **group_options(self.config))
        self._ranks = RankProcesses(self.config, group, group.address)
        core: EngineCore | EngineGroup
        try:
            group.join(RENDEZVOUS_TIMEOUT_S)
            if self.config.data_parallel == 1:
                core = build_engine(self.config, group)
            else:
                from engine.offline.engine_group import start_engines  # here, since one rank does without pyzmq

                core = start_engines(self.config, group)
        except BaseException:
            group.close()
            self._ranks.close()
            raise
        weakref.finalize(self, _close, core, self._ranks)  # in case `close` is not called
        return core

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    def stats(self) -> EngineStats:
        """Return the state of the engine; with `data_parallel`, that of the first."""
        return self._core.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, or token ids). Returns one result per prompt, in order.

        sampling_params, lora_request: one for all prompts, or one for each.
        Raises RequestError, before anything is computed, if any request cannot be served.
        """
        return self._generate(_as_list(prompts), sampling_params, progress, lora_request)

    def _generate(
        self,
        prompts: Sequence[Prompt | ImagePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        lora_requests: LoRARequests,
    ) -> list[RequestOutput]:
        params, adapters = self._params_for(prompts, sampling_params), with_digests(lora_requests, len(prompts))
        columns = zip(prompts, params, adapters, strict=True)
        requests = [self.request(prompt, p, lora_request=lora) for prompt, p, lora in columns]
        for request, p in zip(requests, params, strict=True):
            self.check(request, p)
        jobs = zip(requests, params, strict=True)
        by_id = {output.request_id: output for output in self.run(jobs, total=len(requests), progress=progress)}
        return [by_id[request.request_id] for request in requests]

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        lora_request: LoRARequests = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages), or several, using the model's chat template.

        A message's content may contain images: parts of the form `{"type": "image", "image": <PIL.Image>}`.
        Without sampling_params, an answer can be as long as the context allows.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self._chat_prompt(list(c), template_arguments) for c in conversations]
        return self._generate(prompts, sampling_params or SamplingParams(max_tokens=None), progress, lora_request)

    def _chat_prompt(self, messages: list[Message], template_arguments: dict[str, Any]) -> ImagePrompt | list[int]:
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        images = [part["image"] for part in parts if part.get("type") == "image"]
        if not images:
            return self.tokenizer.apply_chat_template(messages, **template_arguments)
        if self._model_config.vision is None:
            raise InvalidParameter("messages", Described("an image"), "text, because this model reads no images")
        if self._image_processor is None:
            from engine.multimodal.processor import ImageProcessor

            folder = engine_folder(self.config)
            self._image_processor = ImageProcessor.from_folder(
                folder, json.loads(self._model_config.vision.transformers), self.tokenizer
            )
        processor = self._image_processor
        found = [processor.process(image.convert("RGB"), f"images[{i}]") for i, image in enumerate(images)]
        text = self.tokenizer.render_chat_template(messages, **template_arguments)
        return ImagePrompt(*processor.place(text, found, self.max_model_len))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        progress: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt (text, or token ids), in order.

        prompt_name: name of a prompt in config_sentence_transformers.json to put in front of each text; None for the
        file's default prompt, if it has one. Raises RequestError, before anything is computed, if any prompt cannot be
        served, and EngineError if an embedding is not finite.
        """
        jobs = self._pooling_prompts().embed(_as_list(prompts), pooling_params or PoolingParams(), prompt_name)
        return [
            EmbeddingRequestOutput(
                delta.request_id, job.token_ids, EmbeddingOutput(_numbers(delta).tolist()), delta.num_cached_tokens
            )
            for job, delta in zip(jobs, self._pool(jobs, progress, lora_request), strict=True)
        ]

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        progress: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document fits the query, in the order of the documents.

        A reranker reads query and document together. For an embedding model the score is the cosine of the two
        embeddings. instruction: the instruction for a generative reranker, which replaces its default. Raises the same
        errors as `embed`.
        """
        documents = [documents] if isinstance(documents, str) else list(documents)
        params, prompts = pooling_params or PoolingParams(), self._pooling_prompts()
        if "score" in self._model_config.supported_tasks:
            jobs = prompts.score([(query, document) for document in documents], params, instruction)
            deltas = self._pool(jobs, progress, lora_request)
            scores = [_numbers(delta).item() for delta in deltas]
        else:
            refuse_instruction(instruction)
            params = msgspec.structs.replace(params, use_activation=True)
            jobs = [*prompts.embed_queries([query], params), *prompts.embed_documents(documents, params)]
            _, *deltas = both = self._pool(jobs, progress, lora_request)
            first, *others = map(_numbers, both)
            scores = [float(first @ other) for other in others]
            jobs = [PoolingPrompt(jobs[0].token_ids + job.token_ids, job.params) for job in jobs[1:]]
        return [
            ScoringRequestOutput(delta.request_id, job.token_ids, ScoringOutput(score), delta.num_cached_tokens)
            for job, delta, score in zip(jobs, deltas, scores, strict=True)
        ]

    def request(
        self,
        prompt: Prompt | ImagePrompt,
        params: SamplingParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Return a request that is not computed yet; `run` computes it.

        request_id: id that is unique among concurrent requests, and the source of the seed if `params` has none. By
        default it consists of the engine's seed and a counter.
        """
        images: list[MultiModalFeatureSpec] = []
        if isinstance(prompt, ImagePrompt):
            images, prompt = prompt.mm_features, prompt.token_ids
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        request_id = request_id or f"{self.config.seed}-{next(self._numbers)}"
        return RequestOutput(request_id, text, ids, outputs, mm_features=images, lora_request=lora_request)

    def check(self, request: RequestOutput, params: SamplingParams) -> None:
        """Raise RequestError if the engine would refuse this request."""
        self._core.check(next(self._messages(request, params)))

    def run(
        self, jobs: Iterable[tuple[RequestOutput, SamplingParams]], *, total: int | None = None, progress: bool = True
    ) -> Iterator[RequestOutput]:
        """Compute requests, and yield each when it is finished. `jobs` is read only as fast as the engine takes them.

        A request that is refused or fails is yielded too, with finish_reason "error".
        """
        queue = iter(jobs)
        live: dict[str, _Sequence] = {}
        with _progress(progress) as bar:
            task = bar.add_task("generating", total=total, speed="")
            tokens = 0
            try:
                while True:
                    for refused in self._feed(queue, live):
                        bar.advance(task)
                        yield refused
                    if not live:
                        return
                    for event in self._core.step():
                        tokens += len(event.delta.token_ids)
                        finished = self._record(event, live)
                        if finished is not None:
                            bar.advance(task)
                            yield finished
                    elapsed = bar.tasks[task].elapsed
                    if elapsed:
                        bar.update(task, speed=f"{tokens / elapsed:,.0f} tokens/s")
            finally:
                for request_id in live:  # the caller gave up, or a step failed: leave nothing behind
                    self._core.abort(request_id)

    def deltas(self, request: GenerateRequest) -> Generator[TokenDelta]:
        """Run one request of a server, with nothing else running, and yield its deltas. Closing the generator
        aborts it. Raises RequestError, or EngineError if the request fails."""
        self._core.check(request)
        self._core.add(request)
        try:
            while True:
                for event in self._core.step():
                    if event.delta.error is not None:
                        raise EngineError(request.request_id, event.delta.error.message)
                    yield event.delta
                    if event.delta.finish_reason is not None:
                        return
        finally:
            self._core.abort(request.request_id)  # if it has not ended

    def _pooling_prompts(self) -> PoolingPrompts:
        return PoolingPrompts(self.tokenizer, self._model_config.supported_tasks, self.max_model_len)

    def _pool(self, jobs: list[PoolingPrompt], progress: bool, lora_requests: LoRARequests) -> list[TokenDelta]:
        """Compute the jobs. Returns their deltas in order. Raises RequestError or EngineError, after aborting
        all jobs."""
        requests = [
            GenerateRequest(
                request_id=f"{self.config.seed}-{next(self._numbers)}",
                prompt=job.token_ids,
                pooling=job.params,
                lora=lora,
            )
            for job, lora in zip(jobs, with_digests(lora_requests, len(jobs)), strict=True)
        ]
        for request in requests:
            self._core.check(request)
        ended: dict[str, TokenDelta] = {}
        live: set[str] = set()
        room = 2 * self.config.slots
        # sorted by length, because an encoder computes requests of equal length together
        queue = iter(sorted(requests, key=lambda request: len(request.prompt), reverse=True))
        with _progress(progress) as bar:
            task = bar.add_task("pooling", total=len(requests), speed="")
            try:
                while len(ended) < len(requests):
                    for request in itertools.islice(queue, room - len(live)):
                        self._core.add(request)
                        live.add(request.request_id)
                    for event in self._core.step():
                        if event.delta.error is not None:
                            raise EngineError(event.delta.request_id, NOT_FINITE)  # the only one
                        ended[event.delta.request_id] = event.delta
                        live.discard(event.delta.request_id)
                        bar.advance(task)
            finally:
                for request_id in live:  # the caller gave up, or a step failed: leave nothing behind
                    self._core.abort(request_id)
        return [ended[request.request_id] for request in requests]

    def _params_for(
        self, prompts: Sequence[object], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            message = f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts"
            raise RequestError(message, "sampling_params")
        return list(sampling_params)

    def _messages(self, request: RequestOutput, params: SamplingParams) -> Iterator[GenerateRequest]:
        """Yield one engine request per sequence."""
        if params.bad_words:
            ids = self.tokenizer.bad_words_token_ids(params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=ids)
        for output in request.outputs:
            yield GenerateRequest(
                request_id=f"{request.request_id}-{output.index}",
                prompt=request.prompt_token_ids,
                mm_features=request.mm_features,
                lora=request.lora_request,
                params=params.sequence(output.index),
            )

    def _feed(
        self, queue: Iterator[tuple[RequestOutput, SamplingParams]], live: dict[str, _Sequence]
    ) -> Iterator[RequestOutput]:
        """Keep up to twice `max_num_seqs` requests in the engine: those that run, and as many waiting. Yields the
        requests that the engine refuses."""
        while len(live) < 2 * self.config.slots:
            job = next(queue, None)
            if job is None:
                return
            request, params = job
            try:
                for message, output in zip(self._messages(request, params), request.outputs, strict=True):
                    self._core.add(message)
                    live[message.request_id] = _Sequence(request, output, TextStream(params, self.tokenizer))
            except RequestError as error:  # raised for the first of its sequences: they differ only in their seed
                for output in request.outputs:
                    output.finish_reason, output.error = "error", str(error)
                yield request

    def _record(self, event: Event | Answer, live: dict[str, _Sequence]) -> RequestOutput | None:
        """Add a delta to its request. Returns the request once all its sequences have ended."""
        delta = event.delta
        sequence = live[delta.request_id]
        output, request = sequence.output, sequence.parent
        if delta.finish_reason in ("error", "abort"):
            output.finish_reason = delta.finish_reason
            output.error = delta.error.message if delta.error else None
        else:
            chunk = sequence.text.add(delta)
            output.text += chunk.text
            output.token_ids += chunk.token_ids
            if output.logprobs is not None and chunk.logprobs:
                output.logprobs += chunk.logprobs
            output.finish_reason, output.stop_reason = chunk.finish_reason, chunk.stop_reason
            if output.index == 0:
                request.num_cached_tokens += delta.num_cached_tokens
                request.prompt_logprobs = request.prompt_logprobs or delta.prompt_logprobs
        if output.finish_reason is None:
            return None
        last = delta if delta.finish_reason else None
        if last is None:  # a stop string
            aborted = self._core.abort(delta.request_id, "stop")
            last = aborted.delta if aborted else None
        if last is not None:
            output.times, output.num_preemptions = last.times, last.num_preemptions
        del live[delta.request_id]
        return request if request.finished else None


def _close(core: EngineCore | EngineGroup, ranks: RankProcesses | None) -> None:
    core.close()
    if ranks:
        ranks.close()


def _numbers(delta: TokenDelta) -> np.ndarray:
    return np.frombuffer(delta.pooled, dtype="<f4")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a single text or list of token ids is one prompt. Raises InvalidParameter."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParameter("prompts", prompts, "texts or lists of token ids")
    some: list[Any] = list(prompts)
    if some and all(isinstance(prompt, Integral) for prompt in some):
        return [some]
    for prompt in some:
        if isinstance(prompt, Integral):
            message = f"prompts must be texts or lists of token ids, but {prompt} is a token id itself"
            raise RequestError(message, "prompts")
        if not isinstance(prompt, Iterable):
            raise InvalidParameter("prompts", prompt, "texts or lists of token ids")
        for token in () if isinstance(prompt, str) else prompt:
            if not isinstance(token, Integral):
                raise InvalidParameter("prompts", token, "texts or lists of token ids, which are whole numbers")
    return some


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        disable=not shown,
        transient=False,
    )

"""Offline inference: `from manta import LLM, SamplingParams`."""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.devices.device import is_gpu
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.engine_options import GPU_DEFAULTS
from engine.errors import Described, EngineError, InvalidParameter, RequestError
from engine.model.checkpoint.overlay import engine_folder
from engine.model.checkpoint.sampling_defaults import default_sampling
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.stage import check_stages
from engine.offline.adapters import LoRARequests, adapter_of, with_digests
from engine.offline.arguments import named, refuse_method
from engine.offline.engine_arguments import engine_options, template_text
from engine.offline.interrupts import held_interrupts
from engine.offline.lora_request import LoRARequest
from engine.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    by_token,
)
from engine.offline.pooling import OfflinePooling
from engine.offline.progress_bar import progress_bar
from engine.offline.prompts import ImagePrompt, ParsedPrompt, PromptType, parse_prompt, parse_prompts, with_images
from engine.offline.rank_processes import RENDEZVOUS_TIMEOUT_S, RankProcesses
from engine.offline.sampling_params import SamplingParams, engine_params
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.text_stream import TextStream
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import MultiModalFeatureSpec, PromptImages
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams as EngineParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenDelta

if TYPE_CHECKING:
    from engine.multimodal.processor import ImageProcessor
    from engine.offline.engine_group import EngineGroup, StepOutput


Message = dict[str, Any]
AnyParams = SamplingParams | EngineParams
Priority = int | Sequence[int] | None
GivenParams = AnyParams | Sequence[AnyParams] | None
"""One for all prompts, or one for each; None for the defaults of the model's authors."""


@dataclass(slots=True)
class _Sequence:
    """One unfinished sequence: the request it belongs to, and its text so far."""

    parent: RequestOutput
    output: CompletionOutput
    text: TextStream


class LLM:
    """One engine in this process; with `tensor_parallel_size` or `pipeline_parallel_size`, the other ranks are child
    processes. With `data_parallel_size`, the other engines are too, and requests are spread over all of them.

    >>> llm = LLM("pocket")
    >>> llm.chat([{"role": "user", "content": "What is an ocean?"}])[0].outputs[0].text

    chat_template: a file with a Jinja template, or its text; None for the model's own. revision: branch, tag or commit
    of a Hub id. generation_config, override_generation_config: where `get_default_sampling_params` comes from, as in
    vLLM: `auto` (the model's generation_config.json), `vllm` (no file) or a folder; and fields in place of the file's.
    options: fields of EngineConfig (dtype, max_model_len, max_num_seqs, ...), or vLLM's names of them
    (docs/vllm.md).
    Raises ConfigError for an option that is not supported or not known, and StartupError if the
    model cannot be loaded. Not thread-safe: use it from one thread at a time.
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        chat_template: str | Path | None = None,
        revision: str | None = None,
        served_model_name: str | Sequence[str] | None = None,
        generation_config: str = "auto",
        override_generation_config: dict[str, Any] | None = None,
        **options: Any,
    ):
        model = str(model) if revision is None else f"{model}@{revision}"
        options = engine_options(options)
        # with a single client there is no need to keep the queue or steps short
        options = {"model": model, "max_waiting": sys.maxsize, "max_prefill_step_s": 0.0, **options}
        if is_gpu(options.get("device", "auto")):
            options = GPU_DEFAULTS | options
        self.config = EngineConfig(**options)
        folder = engine_folder(self.config)
        self._model_config = ModelConfig.from_folder(folder, language_model_only=self.config.language_model_only)
        self._model_config.kv_heads_per_rank(self.config.tensor_parallel_size)  # raises before processes are started
        check_stages(self.config, self._model_config)
        check_experts(self.config, self._model_config)
        self.tokenizer = ChatTokenizer.from_folder(
            folder, decodes="generate" in self._model_config.supported_tasks, template=template_text(chat_template)
        )
        self._default_sampling = default_sampling(folder, generation_config, override_generation_config or {})
        self._image_processor: ImageProcessor | None = None
        self._ranks: RankProcesses | None = None
        self._core = self._start()
        # also as the interpreter exits
        self._end = weakref.finalize(self, _close, self._core, self._ranks, os.getpid())
        self._numbers = itertools.count()
        self._pooling = OfflinePooling(
            self._core, self.config, self.tokenizer, self._model_config.supported_tasks, self._numbers
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's thread and the other ranks. Memory is freed with the object. An object that is dropped, or
        that is there when the interpreter exits, is closed by itself."""
        self._end()

    def _start(self) -> EngineCore | EngineGroup:
        if self.config.world_size == 1:
            return build_engine(self.config, engine_id=self._name)
        group = TPGroup.listen(self.config.world_size, key=ClusterKey.generate(), **group_options(self.config))
        self._ranks = RankProcesses(self.config, group, group.address)
        core: EngineCore | EngineGroup
        try:
            group.join(RENDEZVOUS_TIMEOUT_S)
            if self.config.data_parallel_size == 1:
                core = build_engine(self.config, group, engine_id=self._name)
            else:
                from engine.offline.engine_group import start_engines  # here, since one rank does without pyzmq

                core = start_engines(self.config, group)
        except BaseException:
            group.close()
            self._ranks.close()
            raise
        return core

    @property
    def _name(self) -> str:
        """The last part of the model's path, also for `.` and `..`. A link keeps its own name."""
        return os.path.basename(os.path.abspath(self.config.model))

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer, with `encode`, `decode` and `apply_chat_template`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's authors recommend in its generation_config.json."""
        return SamplingParams(**self._default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns True, since nothing runs between calls."""
        if not isinstance(self._core, EngineCore):
            raise RequestError("reset_prefix_cache is not supported with data_parallel_size: use cache_salt in prompts")
        self._core.apply(CacheCleared())
        return True

    def __getattr__(self, name: str) -> Any:
        refuse_method(name)

    def stats(self) -> EngineStats:
        """Return the state of the engine; with `data_parallel_size`, that of the first."""
        return self._core.stats()

    @named
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: GivenParams = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (a text, token ids, or vLLM's TextPrompt or TokensPrompt). Returns one result per
        prompt, in order.

        sampling_params, lora_request, priority: one for all prompts, or one for each. use_tqdm: whether to show a
        progress bar. priority: smaller ones run first; needs `scheduling_policy="priority"`.
        Raises RequestError, before anything is computed, if any request cannot be served.
        """
        return self._generate(parse_prompts(prompts), sampling_params, use_tqdm, lora_request, priority)

    def _generate(
        self,
        prompts: Sequence[ParsedPrompt | ImagePrompt | list[int]],
        sampling_params: GivenParams,
        use_tqdm: bool,
        lora_requests: LoRARequests,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        params, adapters = self._params_for(prompts, sampling_params), with_digests(lora_requests, len(prompts))
        own = [engine_params(p) for p in params]
        columns = zip(prompts, own, adapters, strict=True)
        requests = [self._request(prompt, p, lora_request=lora) for prompt, p, lora in columns]
        for request, first in zip(requests, self._priorities(priority, len(requests)), strict=True):
            request.priority = first
        for request, given, p in zip(requests, params, own, strict=True):
            if isinstance(given, SamplingParams):
                request.detokenize = given.detokenize
                if given.skip_reading_prefix_cache:
                    request.cache_salt = f"computed by {request.request_id}"
            self.check(request, p)
        jobs = zip(requests, own, strict=True)
        by_id = {output.request_id: output for output in self.run(jobs, total=len(requests), use_tqdm=use_tqdm)}
        return [by_id[request.request_id] for request in requests]

    def _priorities(self, priority: Priority, count: int) -> Sequence[int]:
        if priority is None or isinstance(priority, int):
            priority = [priority or 0] * count
        if len(priority) != count:
            raise RequestError(f"priority has {len(priority)} entries for {count} prompts", "priority")
        if any(priority) and self.config.scheduling_policy != "priority":
            raise InvalidParameter("priority", list(priority), 'left out without LLM(scheduling_policy="priority")')
        return priority

    @named
    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: GivenParams = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        chat_template: str | Path | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages), or several, using the model's chat template.

        A message's content may contain images: parts of the form `{"type": "image", "image": <PIL.Image>}`, or vLLM's
        `image_pil` and `image_url` with a data URL. Without sampling_params, an answer can be as long as the context
        allows. chat_template: a file with a Jinja template, or its text, in place of the model's.
        add_generation_prompt: whether the prompt ends with the beginning of an answer. continue_final_message: whether
        the answer continues the last message instead of answering it. tools: functions that the model may call, in
        OpenAI's form. chat_template_kwargs: further variables of the template.
        """
        if add_generation_prompt and continue_final_message:
            limit = "False with add_generation_prompt, because an answer cannot both begin and continue a message"
            raise InvalidParameter("continue_final_message", True, limit)
        variables = {
            **(chat_template_kwargs or {}),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.tokenizer
        if (template := template_text(chat_template)) is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template, tokenizer.tool_template = template, None
        prompts = [self._chat_prompt(tokenizer, list(c), variables) for c in conversations]
        if sampling_params is None:
            sampling_params = SamplingParams(**{"max_tokens": None, **self._default_sampling})
        return self._generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    def _chat_prompt(
        self, tokenizer: ChatTokenizer, messages: list[Message], template_arguments: dict[str, Any]
    ) -> ImagePrompt | list[int]:
        messages, images = with_images(messages)
        if not images:
            return tokenizer.apply_chat_template(messages, **template_arguments)
        if self._model_config.vision is None:
            raise InvalidParameter("messages", Described("an image"), "text, because this model reads no images")
        return self._with_images(tokenizer.render_chat_template(messages, **template_arguments), images)

    def _with_images(self, text: str, images: list[Any]) -> ImagePrompt:
        """Return the prompt of a text, with one image for each placeholder in it."""
        vision = self._model_config.vision
        assert vision is not None
        if self._image_processor is None:
            from engine.multimodal.processor import ImageProcessor

            folder = engine_folder(self.config)
            self._image_processor = ImageProcessor.from_folder(folder, json.loads(vision.transformers), self.tokenizer)
        processor = self._image_processor
        found = [processor.process(image.convert("RGB"), f"images[{i}]") for i, image in enumerate(images)]
        return ImagePrompt(*processor.place(text, found, self.max_model_len))

    @named
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt (text, or token ids), in order.

        prompt_name: name of a prompt in config_sentence_transformers.json to put in front of each text; None for the
        file's default prompt, if it has one. Raises RequestError, before anything is computed, if any prompt cannot be
        served, and EngineError if an embedding is not finite.
        """
        asked = parse_prompts(prompts), pooling_params or PoolingParams(), prompt_name, use_tqdm, lora_request
        return [
            EmbeddingRequestOutput(request_id, prompt, EmbeddingOutput(numbers.tolist()), cached)
            for request_id, prompt, numbers, cached in self._pooling.pool("embed", *asked)
        ]

    @named
    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the classes of each prompt (text, or token ids), in order. Raises the same errors
        as `embed`."""
        asked = parse_prompts(prompts), pooling_params or PoolingParams(), None, use_tqdm, lora_request
        return [
            ClassificationRequestOutput(request_id, prompt, ClassificationOutput(numbers.tolist()), cached)
            for request_id, prompt, numbers, cached in self._pooling.pool("classify", *asked)
        ]

    @named
    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: Literal["embed", "token_embed", "classify", "token_classify"],
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the numbers of each prompt (text, or token ids), in order: an array, with `token_embed` and
        `token_classify` one with a row for each token. Raises the same errors as `embed`."""
        asked = parse_prompts(prompts), pooling_params or PoolingParams(), None, use_tqdm, lora_request
        return [
            PoolingRequestOutput(request_id, prompt, PoolingOutput(numbers), cached)
            for request_id, prompt, numbers, cached in self._pooling.pool(pooling_task, *asked)
        ]

    @named
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document (`data_2`) fits the query (`data_1`), or its own query if there are as many
        queries as documents, in the order of the documents.

        A reranker reads query and document together. For an embedding model the score is the cosine of the two
        embeddings. instruction: the instruction for a generative reranker, which replaces its default. Raises the same
        errors as `embed`.
        """
        params = pooling_params or PoolingParams()
        return self._pooling.score(data_1, data_2, params, instruction, use_tqdm, lora_request)

    def request(
        self,
        prompt: PromptType,
        params: EngineParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Return a request that is not computed yet; `run` computes it.

        request_id: id that is unique among concurrent requests, and the source of the seed if `params` has none. By
        default it consists of the engine's seed and a counter.
        """
        return self._request(parse_prompt(prompt), params, request_id, lora_request)

    def _request(
        self,
        prompt: ParsedPrompt | ImagePrompt | list[int],
        params: EngineParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        text, salt, images = None, "", list[MultiModalFeatureSpec]()
        if isinstance(prompt, ParsedPrompt):
            text, salt = prompt.text, prompt.cache_salt
            prompt = self._of_parsed(prompt)
        if isinstance(prompt, ImagePrompt):
            images, prompt = prompt.mm_features, prompt.token_ids
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        request_id = request_id or f"{self.config.seed}-{next(self._numbers)}"
        return RequestOutput(
            request_id, text, prompt, outputs, mm_features=images, lora_request=lora_request, cache_salt=salt
        )

    def _of_parsed(self, prompt: ParsedPrompt) -> ImagePrompt | list[int]:
        if not prompt.images:
            content = prompt.content
            return self.tokenizer.encode(content) if isinstance(content, str) else content
        if self._model_config.vision is None:
            raise InvalidParameter("prompts", Described("an image"), "text, because this model reads no images")
        assert prompt.text is not None
        return self._with_images(prompt.text, prompt.images)

    def check(self, request: RequestOutput, params: EngineParams) -> None:
        """Raise RequestError if the engine would refuse this request."""
        self._core.check(next(self._messages(request, params)))

    def run(
        self, jobs: Iterable[tuple[RequestOutput, EngineParams]], *, total: int | None = None, use_tqdm: bool = True
    ) -> Iterator[RequestOutput]:
        """Compute requests, and yield each when it is finished. `jobs` is read only as fast as the engine takes them.

        A request that is refused or fails is yielded too, with finish_reason "error".
        """
        queue = iter(jobs)
        live: dict[str, _Sequence] = {}
        with progress_bar(use_tqdm) as bar:
            task = bar.add_task("generating", total=total, speed="")
            tokens = 0
            try:
                while True:
                    for refused in self._feed(queue, live):
                        bar.advance(task)
                        yield refused
                    if not live:
                        return
                    with held_interrupts():
                        events = self._core.step()
                    for event in events:
                        tokens += len(event.delta.token_ids)
                        finished = self._record(event, live)
                        if finished is not None:
                            bar.advance(task)
                            yield finished
                    elapsed = bar.tasks[task].elapsed
                    if elapsed:
                        bar.update(task, speed=f"{tokens / elapsed:,.0f} tokens/s")
            finally:
                with held_interrupts():
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

    def _params_for(self, prompts: Sequence[object], sampling_params: GivenParams) -> Sequence[AnyParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, AnyParams):
            return [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            message = f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts"
            raise RequestError(message, "sampling_params")
        for params in sampling_params:
            if not isinstance(params, AnyParams):
                raise InvalidParameter("sampling_params", params, "SamplingParams, or one for each prompt")
        return sampling_params

    def _messages(self, request: RequestOutput, params: EngineParams) -> Iterator[GenerateRequest]:
        """Yield one engine request per sequence."""
        if params.bad_words:
            ids = self.tokenizer.bad_words_token_ids(params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=ids)
        for output in request.outputs:
            yield GenerateRequest(
                request_id=f"{request.request_id}-{output.index}",
                prompt=request.prompt_token_ids,
                cache_salt=request.cache_salt,
                priority=request.priority,
                params=params.sequence(output.index),
            ).asking(PromptImages.of(request.mm_features), adapter_of(request.lora_request))

    def _feed(
        self, queue: Iterator[tuple[RequestOutput, EngineParams]], live: dict[str, _Sequence]
    ) -> Iterator[RequestOutput]:
        """Keep up to twice `max_num_seqs` requests in the engine: those that run, and as many waiting. Yields the
        requests that the engine refuses."""
        while len(live) < 2 * self.config.slots:
            job = next(queue, None)
            if job is None:
                return
            request, params = job
            try:
                with held_interrupts():
                    for message, output in zip(self._messages(request, params), request.outputs, strict=True):
                        self._core.add(message)
                        live[message.request_id] = _Sequence(request, output, TextStream(params, self.tokenizer))
            except RequestError as error:  # raised for the first of its sequences: they differ only in their seed
                for output in request.outputs:
                    output.finish_reason, output.error = "error", str(error)
                yield request

    def _record(self, event: Event | StepOutput, live: dict[str, _Sequence]) -> RequestOutput | None:
        """Add a delta to its request. Returns the request once all its sequences have ended."""
        delta = event.delta
        sequence = live[delta.request_id]
        output, request = sequence.output, sequence.parent
        if delta.finish_reason in ("error", "abort"):
            output.finish_reason = delta.finish_reason
            output.error = delta.error.message if delta.error else None
        else:
            chunk = sequence.text.add(delta)
            output.text += chunk.text if request.detokenize else ""
            output.token_ids += chunk.token_ids
            if output.logprobs is not None and chunk.logprobs:
                output.logprobs += [by_token(entry, self.tokenizer.token_text) for entry in chunk.logprobs]
            output.finish_reason, output.stop_reason = chunk.finish_reason, chunk.stop_reason
            if output.index == 0:
                request.num_cached_tokens += delta.num_cached_tokens
                if delta.prompt_logprobs:
                    request.prompt_logprobs = [
                        None if entry is None else by_token(entry, self.tokenizer.token_text)
                        for entry in delta.prompt_logprobs
                    ]
        if output.finish_reason is None:
            return None
        last = delta if delta.finish_reason else None
        if last is None:  # a stop string
            last = next((event.delta for event in self._core.abort(delta.request_id, "stop")), None)
        if last is not None:
            output.times, output.num_preemptions = last.times, last.num_preemptions
        del live[delta.request_id]
        return request if request.finished else None


def _close(core: EngineCore | EngineGroup, ranks: RankProcesses | None, owner: int) -> None:
    """Close the engine in the process that has started it. A fork of that process has none of its threads, and must
    leave its tape and its children alone."""
    if os.getpid() != owner:
        return
    core.close()
    if ranks:
        ranks.close()

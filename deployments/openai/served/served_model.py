"""One model of the API: turns request bodies into responses that are ready to run."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from deployments.billing.prices import FREE, Prices
from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.availability import Availability
from deployments.frontend.sequence_context import SequenceContext
from deployments.frontend.token_channel import TokenChannel
from deployments.http.context import RequestContext
from deployments.observability.telemetry import Telemetry
from deployments.openai.chat_body import ChatBody
from deployments.openai.chat_output import ChatOutput
from deployments.openai.completion import CompletionResponse
from deployments.openai.completion_body import MAX_SEQUENCES, CompletionBody, DetokenizeBody
from deployments.openai.conversation import Message, Tool
from deployments.openai.formats.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.formats.choice_parser import OutputFormat
from deployments.openai.formats.families import ReasoningParserName, ToolCallParserName
from deployments.openai.response_bodies import DetokenizedText, Tokens
from deployments.openai.sampling_body import INT32, GenerationBody
from deployments.openai.served.model_part import Draft, ModelPart
from deployments.openai.template_body import TemplateBody, TokenizeBody
from deployments.poison.poison import Poison
from deployments.poison.sequence_trial import SequenceTrial
from deployments.replicas.pools import EnginePool
from deployments.served_adapter import ServedAdapter
from engine.errors import (
    EngineUnavailable,
    InvalidParameter,
    PromptTooLong,
    RequestTimeout,
)
from engine.hooks import overriding
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.parts.costs import ReportCost
from engine.wire.parts.pooling import SupportedTasks, Task
from engine.wire.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

TOKENIZING_THREADS = (os.cpu_count() or 1) + 4
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a model that the API needs."""

    name: str
    """Name under which the model is served."""
    root: str
    """Name or folder of the model in the configuration."""
    folder: str
    """Folder of the tokenizer."""
    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, Any]
    """Defaults for fields that a request leaves open, by field of SamplingParams."""
    max_new_tokens: int | None = None
    """Limit of every answer, whatever its request says; None for no limit but the context."""
    request_timeout_s: float
    """Time limit of a request in the whole cluster, in seconds; a request may set a lower one."""
    admission: AdmissionLimits
    identity: ModelIdentity | None = None
    """Identity of the model's files; None accepts replicas of any model."""
    may_sleep: bool = False
    """Whether the model may be scaled to zero."""
    block_size: int | None = None
    """Block size of the engines' KV caches; None if requests share no prefixes."""
    supported_tasks: SupportedTasks = SupportedTasks()  # noqa: RUF009  frozen
    """Tasks that the model supports; by default it generates."""
    max_replays: int = 3
    """Maximum number of times that a sequence resumes in another engine because its engine was lost."""
    sdc_check_every: int | None = None
    """One in this many answers is recomputed to detect silent data corruption; None for none."""
    same_bits: bool = False
    """Whether an answer has the same bits in any batch and in all engines."""
    has_priorities: bool = False
    """Whether the engines schedule by priority."""
    drafts: bool = False
    """Whether the engines use speculative decoding."""
    image_folder: str | None = None
    """Folder of the image processor; None for a model that reads text only."""
    fingerprint: str | None = None
    """Fingerprint of everything on which answers depend: weights, numerics and version."""
    aliases: tuple[str, ...] = ()
    """Further names under which requests may ask for the model."""
    chat_template: str | None = None
    """Text of the chat template; None for the one in the folder."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Default variables of the chat template; a request's variables override them."""
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    closed_objects: bool = True
    """Whether an object whose JSON schema says nothing of further properties has none."""
    of: Mapping[str, Any] = field(default_factory=dict)
    """What parts have read of the model's configuration, by their names."""
    adapter: ServedAdapter | None = None
    """The adapter with which requests are computed; None for the model itself."""
    prices: Prices = FREE

    def adapted(self, adapter: ServedAdapter) -> ModelInfo:
        """Return the facts about the model with this adapter, which is listed as a separate model."""
        fingerprint = self.fingerprint and f"{self.fingerprint}_{adapter.digest[:8]}"
        return replace(self, name=adapter.name, root=adapter.path, aliases=(), fingerprint=fingerprint, adapter=adapter)


class ServedModel:
    def __init__(
        self,
        info: ModelInfo,
        tokenizer: ChatTokenizer,
        pool: EnginePool,
        channel: TokenChannel,
        telemetry: Telemetry,
        parts: Callable[[ServedModel], Sequence[ModelPart]] = lambda model: (),
    ):
        """parts: returns the ends of features in a model that lacks nothing else."""
        self.info, self.pool = info, pool
        stats = telemetry.stats.model(info.name)
        self.admission = Admission(pool, info.admission, stats, Availability(info.name))
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(TOKENIZING_THREADS, "tokenizing")
        self.format = ChatFormat.of(tokenizer, info.tool_call_parser, info.reasoning_parser, closed=info.closed_objects)
        self.markers = VisibleMarkers(tokenizer, self.format.markers)
        _ = tokenizer.max_token_bytes  # compute it now, not during the first requests
        logger.info(
            "chat format model=%s tool_call_parser=%s reasoning_parser=%s shows_tools=%s",
            info.name,
            self.format.tool_call_parser,
            self.format.reasoning_parser,
            self.format.shows_tools,
        )
        self.frontend = SequenceContext(
            model=info.name,
            tokenizer=self.markers,
            channel=channel,
            pool=pool,
            admission=self.admission,
            stats=stats,
            timelines=telemetry.timelines,
            max_replays=info.max_replays,
            max_model_len=info.max_model_len,
            prices=info.prices,
            hourly=telemetry.hourly,
        )
        self.poison = Poison()
        self._parts = found = parts(self)
        self._checks = overriding(found, ModelPart.check)
        self._prompt_checks = overriding(found, ModelPart.check_prompts)
        self._shares = overriding(found, ModelPart.share)
        self._loads = overriding(found, ModelPart.load)
        self._expands = overriding(found, ModelPart.expand)
        self._edits = overriding(found, ModelPart.requests)
        self.frontend = replace(
            self.frontend,
            observers=(partial(SequenceTrial, self.poison), *overriding(found, ModelPart.observer)),
            generation_observers=overriding(found, ModelPart.generation_observer),
        )

    def adapted(self, adapter: ServedAdapter) -> ServedModel:
        """Return the model with this adapter, which shares everything with the model itself."""
        model = copy.copy(self)
        model.info = self.info.adapted(adapter)
        return model

    @property
    def input_modalities(self) -> list[str]:
        """Kinds of input that prompts may have, in OpenRouter's terms."""
        return ["text", *(kind for part in self._parts for kind in part.input_modalities)]

    @property
    def main_task(self) -> Literal["chat"] | Task:
        """What most requests ask of the model: `chat` if it has a chat template, otherwise its first task."""
        task = self.info.supported_tasks.names[0]
        return "chat" if task == "generate" and self.tokenizer.chat_template is not None else task

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run tokenization or detokenization in a thread, and return its result. The thread pool does nothing else, so
        that other work of an ingress, such as reading a file, never waits for long texts. Raises
        RequestTimeout; what a thread has begun goes on, and keeps only requests of this model waiting."""
        call, limit_s = partial(copy_context().run, work, *args, **kwargs), self.info.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except TimeoutError:
            raise RequestTimeout("tokenize", limit_s) from None

    def check_priority(self, priority: int) -> None:
        """Raise InvalidParameter for a priority if the engines ignore priorities."""
        if priority and not self.info.has_priorities:
            raise InvalidParameter("priority", priority, "0, because this server runs requests in order of arrival")

    def new_request(self, context: RequestContext, priority: int, cache_salt: str) -> GenerateRequest:
        """Return an engine request with the fields that all requests of one HTTP request share, without a prompt.

        priority: priority that the client asks for. A background request gets a priority below all others.
        """
        limit_s = self.info.request_timeout_s
        request = GenerateRequest(
            # clients may reuse an id, but engines must never see two live requests with the same id
            request_id=f"{context.response_id}-{secrets.token_hex(4)}",
            prompt=[],
            reply_to=self.frontend.channel.address,
            client=context.client,
            timeout_s=min(context.timeout_s or limit_s, limit_s),
            priority=0 if not self.info.has_priorities else INT32 if context.background else priority,
            cache_salt=cache_salt,
            session_id=context.session_id,
            model=self.info.identity,
        ).asking(None if self.info.adapter is None else self.info.adapter.record)
        for share in self._shares:
            request = share(request)
        return request

    async def check_health(self) -> None:
        """Raise EngineUnavailable if no replica is healthy, unless the model is scaled to zero."""
        try:
            await self.pool.statuses()
            self.admission.availability.report_up()
        except EngineUnavailable:
            if not await self.pool.asleep():
                raise

    async def chat(self, body: ChatBody, context: RequestContext) -> ChatOutput:
        """Start a chat. Raises RequestError, and Overloaded before any work is done."""
        self.check_admission(context)
        self.format.check(body)
        draft = self._draft(body, context)
        for load in self._loads:
            await load(draft)
        requests, output_format = await self.in_thread(self._prepare_chat, body, context, draft)
        generation = await context.source.start(self.frontend, requests, context.client, self.info.fingerprint)
        info = self.info
        return ChatOutput(
            info.name,
            context.source.fingerprint or info.fingerprint,
            generation,
            self.tokenizer,
            output_format,
            body.n,
            ignored=[*self._ignored(body), *draft.ignored],
            service_tier=self._served_tier(body),
            reports_cost=body.reports_cost,
            tokens_as_ids=body.return_tokens_as_token_ids,
            hex_id=context.source.hex_id,
        )

    async def completion(self, body: CompletionBody, context: RequestContext) -> CompletionResponse:
        """Start a completion. Raises RequestError, and Overloaded before any work is done."""
        self.check_admission(context)
        draft = self._draft(body, context)
        requests, texts = await self.in_thread(self._prepare_completion, body, context, draft)
        prompts = [sequences[0].prompt for sequences in requests]
        generation = await context.source.start(self.frontend, requests, context.client, self.info.fingerprint)
        info = self.info
        return CompletionResponse(
            body,
            context,
            info.name,
            context.source.fingerprint or info.fingerprint,
            generation,
            self.tokenizer,
            prompts,
            texts,
            ignored=[*self._ignored(body), *draft.ignored],
            service_tier=self._served_tier(body),
        )

    def check_admission(self, context: RequestContext) -> None:
        """Raise Overloaded if admission or a limit of the API key would refuse the request, unless it was admitted
        before."""
        if not context.source.admitted:
            for check in self._checks:
                check()
            self.admission.check(context.client)

    def check_prompts(self, num_tokens: int) -> None:
        """Raise an error for prompts of so many tokens together that could never run."""
        for check in self._prompt_checks:
            check(num_tokens)

    async def tokenize(self, body: TokenizeBody) -> Tokens:
        """Return the tokens of a text or a conversation. Raises RequestError."""
        if body.messages is not None:
            draft = Draft(body=body, request_id="tokenize", timeout_s=self.info.request_timeout_s)
            for load in self._loads:
                await load(draft)
            draft.text = await self.in_thread(self.render_chat, body.messages, body.tools or [], body)
            text, special = await self.in_thread(self.expand, draft, draft.text), False
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        return await self.in_thread(self._tokenize, text, special, body.return_token_strs)

    async def detokenize(self, body: DetokenizeBody) -> DetokenizedText:
        """Return the text of token ids. Raises InvalidParameter for unknown ids."""
        return DetokenizedText(await self.in_thread(self._detokenize, body.tokens))

    def _tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Tokens:
        """Return the tokens of a text. The text can be longer than the context, but not many times longer."""
        self.tokenizer.check_length(text, self.info.max_model_len)
        token_ids = self.tokenizer.encode(text, add_special_tokens)
        strings = [self.tokenizer.token(i) or "" for i in token_ids] if with_strings else None
        return Tokens(len(token_ids), self.info.max_model_len, token_ids, strings)

    def _detokenize(self, token_ids: list[int]) -> str:
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size or self.tokenizer.token(token_id) is None:
                raise InvalidParameter("tokens", token_id, "a list of ids of the model's vocabulary")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _prepare_completion(
        self, body: CompletionBody, context: RequestContext, draft: Draft
    ) -> tuple[list[list[GenerateRequest]], list[str]]:
        """Return the requests of each prompt, and the texts for `echo`. Run it in a thread, since it can take long."""
        params = self._params(body)
        prompts, texts = self._tokenize_prompts(body)
        return self._requests(prompts, params, body, context, draft), texts

    def _prepare_chat(
        self, body: ChatBody, context: RequestContext, draft: Draft
    ) -> tuple[list[list[GenerateRequest]], OutputFormat]:
        """Return the requests with the grammar of their output, and the format for parsing it. Run it in a thread."""
        params = self._params(body)
        draft.text = self.render_chat(body.messages, body.offered_tools, body)
        fields, template = body.field_variables.items(), self.tokenizer.template_for(body.offered_tools) or ""
        draft.ignored += [field for field, names in fields if not any(name in template for name in names)]
        prompt = self._encode(self.expand(draft, draft.text), body)
        draft.thinking = self.format.thinking(body, draft.text)
        grammar = self.format.structured_outputs(body, draft.thinking, params.structured_outputs, self.markers)
        params = msgspec.structs.replace(params, structured_outputs=grammar)
        requests = self._requests([prompt], params, body, context, draft)
        return requests, self.format.output_format(body, draft.thinking, self.markers)

    def _draft(self, body: ChatBody | CompletionBody, context: RequestContext) -> Draft:
        timeout_s = self.info.request_timeout_s if context.timeout_s is None else context.timeout_s
        return Draft(body=body, request_id=context.response_id, session_id=context.session_id, timeout_s=timeout_s)

    def expand(self, draft: Draft, text: str) -> str:
        """Return what is tokenized in place of a draft's text, or of its beginning. Raises RequestError."""
        for expand in self._expands:
            text = expand(draft, text)
        return text

    def render_chat(self, messages: list[Message], tools: list[Tool], body: TemplateBody) -> str:
        """Return the prompt of a conversation."""
        return self.tokenizer.render_chat_template(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in tools] or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **{**self.info.chat_template_kwargs, **body.template_variables},
        )

    def _tokenize_prompts(self, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
        """Return the token ids of each prompt, and the texts for `echo`."""
        prompts, texts = [], []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                texts.append(prompt)
                prompts.append(self._encode(prompt, body))
                continue
            for token_id in prompt:
                if not 0 <= token_id < self.info.vocab_size:
                    raise InvalidParameter("prompt", token_id, f"token ids from 0 to {self.info.vocab_size - 1}")
            texts.append(self.tokenizer.decode(prompt) if body.echo else "")
            prompts.append(self._truncate(prompt, body))
        if body.echo and body.truncate_prompt_tokens is not None:
            texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        return prompts, texts

    def _encode(self, text: str, body: ChatBody | CompletionBody) -> list[int]:
        """Return the token ids of a prompt. Raises PromptTooLong, unless the body allows truncation."""
        if (kept := self._kept(body)) is None:
            return self.tokenizer.encode_prompt(text, self.info.max_model_len, body.add_special_tokens)
        kept = min(kept, self.info.max_model_len)
        return self.tokenizer.encode_truncated(text, kept, body.truncation_side, body.add_special_tokens)

    def _truncate(self, prompt: list[int], body: GenerationBody) -> list[int]:
        if (kept := self._kept(body)) is None:
            return prompt
        return prompt[:kept] if body.truncation_side == "right" else prompt[-kept:]

    def _kept(self, body: GenerationBody) -> int | None:
        """Return how many tokens of a longer prompt to keep; None to keep all, even if they are too many."""
        if body.truncate_prompt_tokens == -1:
            return max(1, self.info.max_model_len - (body.token_limit() or 1))
        return body.truncate_prompt_tokens

    def _params(self, body: GenerationBody) -> SamplingParams:
        self.info.supported_tasks.check("generate", model=f"model {self.info.name!r}")
        params = body.sampling_params(self.info.default_sampling, closed=self.info.closed_objects)
        most = self.info.max_new_tokens
        if most is not None and (params.max_tokens is None or params.max_tokens > most):
            params = msgspec.structs.replace(params, max_tokens=most)
        params.check_vocabulary(self.info.vocab_size)
        for name in ("max_tokens", "min_tokens"):
            if (getattr(params, name) or 0) > self.info.max_model_len:
                limit = f"at most the model's context of {self.info.max_model_len} tokens"
                raise InvalidParameter(name, getattr(params, name), limit)
        self.check_priority(body.priority)
        bad_words = self.tokenizer.bad_words_token_ids(params.bad_words)
        return msgspec.structs.replace(params, bad_words_token_ids=bad_words)

    def _ignored(self, body: GenerationBody) -> list[str]:
        """Return the fields that have no effect on any output."""
        no_tiers = body.tier_priority and not self.info.has_priorities
        return [*body.ignored, *(["service_tier"] if no_tiers else [])]

    def _served_tier(self, body: GenerationBody) -> str | None:
        if "service_tier" not in body.model_fields_set:
            return None
        return body.service_tier if body.tier_priority and self.info.has_priorities else "default"

    def _requests(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        body: GenerationBody,
        context: RequestContext,
        draft: Draft,
    ) -> list[list[GenerateRequest]]:
        for prompt in prompts:
            if not prompt:
                raise InvalidParameter("prompt", "", "a text of at least one token")
            if len(prompt) >= self.info.max_model_len:
                raise PromptTooLong(len(prompt), self.info.max_model_len)
        if len(prompts) * body.n > MAX_SEQUENCES:
            raise InvalidParameter("n", body.n, f"at most {MAX_SEQUENCES // len(prompts)} with {len(prompts)} prompts")
        request = self.new_request(context, body.priority or body.tier_priority, body.cache_salt)
        request = request.asking(ReportCost() if body.reports_cost else None)
        sequences = [params.sequence(j) for j in range(body.n)]
        requests = [
            [
                msgspec.structs.replace(
                    request, request_id=f"{request.request_id}-{i * body.n + j}", prompt=prompt, params=sequence
                )
                for j, sequence in enumerate(sequences)
            ]
            for i, prompt in enumerate(prompts)
        ]
        for edit in self._edits:
            requests = edit(draft, requests)
        return requests

"""One model of the API: from request bodies to answers that are ready to run."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.generation import Generation
from deployments.frontend.token_channel import TokenChannel
from deployments.observability.telemetry import Telemetry
from deployments.openai.chat import ChatResponse
from deployments.openai.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.completion import CompletionResponse
from deployments.openai.context import RequestContext
from deployments.openai.parsers.choice_parser import OutputFormat
from deployments.openai.parsers.names import ReasoningParserName, ToolCallParserName
from deployments.openai.requests import ChatBody, CompletionBody, GenerationBody, Message, TemplateOptions
from deployments.openai.response_meta import ResponseMeta
from deployments.openai.tokenize import DetokenizeBody, DetokenizedText, TokenizeBody, Tokens
from deployments.replicas.engine_pool import EnginePool
from engine.errors import EngineUnavailable, InvalidParameter, PromptTooLong
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import GenerateRequest
from engine.wire.model_identity import ModelIdentity
from engine.wire.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 1024  # of one HTTP request: prompts * n


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the API has to know of a model.

    name: under which it is served. folder: with its tokenizer. root: what the configuration calls it.
    identity: of what is in the folder; None leaves open which model answers.
    default_sampling: by SamplingParams' names.
    request_timeout_s: after which a request is ended, wherever it is; a request may ask for less.
    admission: how many requests the engines get, and how many may wait for them.
    block_size: of its engines' KV blocks; None where requests share no prefixes.
    may_sleep: whether it may be scaled to zero.
    max_replays: how often a sequence may go on in another engine when its own is lost.
    has_priorities: whether the engines look at the priority of a request.
    tool_call_parser, reasoning_parser: how it writes tool calls and reasoning.
    """

    name: str
    root: str
    folder: str
    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, Any]
    request_timeout_s: float
    admission: AdmissionLimits
    identity: ModelIdentity | None = None
    may_sleep: bool = False
    block_size: int | None = None
    max_replays: int = 3
    has_priorities: bool = False
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"


class ServedModel:
    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, pool: EnginePool, channel: TokenChannel, telemetry: Telemetry
    ):
        self.info = info
        self.pool = pool
        self.admission = Admission(pool, info.admission)
        self._tokenizer = tokenizer
        self._format = ChatFormat.of(tokenizer, info.tool_call_parser, info.reasoning_parser)
        self._tokens = VisibleMarkers(tokenizer, self._format.markers)
        logger.info(
            "chat format model=%s tool_call_parser=%s reasons=%s shows_tools=%s",
            info.name,
            self._format.tool_call_parser,
            self._format.reasons,
            self._format.shows_tools,
        )
        self._channel = channel
        self._stats, self._timelines = telemetry.model(info.name, self.admission), telemetry.timelines

    async def check_health(self) -> None:
        """Raises EngineUnavailable if no replica is healthy, unless none is needed."""
        try:
            await self.pool.statuses()
        except EngineUnavailable:
            if not await self.pool.asleep():
                raise

    async def chat(self, body: ChatBody, meta: ResponseMeta, context: RequestContext) -> ChatResponse:
        """Raises RequestError, and Overloaded before any work is done."""
        self.admission.check(context.client)
        self._format.check(body)
        params = self._params(body)
        prompt, params, output_format = await asyncio.to_thread(self._prepare, body, params)
        generation = self._generation([prompt], params, body, meta, context)
        return ChatResponse(meta, body, generation, self._tokenizer, output_format)

    async def completion(self, body: CompletionBody, meta: ResponseMeta, context: RequestContext) -> CompletionResponse:
        """Raises RequestError, and Overloaded before any work is done."""
        self.admission.check(context.client)
        params = self._params(body)
        prompts, texts = await asyncio.to_thread(self._tokenize, body)
        if (prompt_logprobs := body.num_prompt_logprobs()) is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=prompt_logprobs)
        generation = self._generation(prompts, params, body, meta, context)
        return CompletionResponse(meta, body, generation, self._tokenizer, prompts, texts)

    async def tokenize(self, body: TokenizeBody) -> Tokens:
        """Raises RequestError."""
        if body.messages is not None:
            tools = [tool.for_template() for tool in body.tools] if body.tools else None
            _, token_ids = await asyncio.to_thread(self._chat_prompt, body.messages, tools, body.template)
        else:
            special = body.add_special_tokens is not False
            token_ids = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "", special)
        strings = [self._tokenizer.token(i) or "" for i in token_ids] if body.return_token_strs else None
        return Tokens(len(token_ids), self.info.max_model_len, token_ids, strings)

    async def detokenize(self, body: DetokenizeBody) -> DetokenizedText:
        """Raises InvalidParameter for ids that are no tokens."""
        for token_id in body.tokens:
            if not 0 <= token_id < self.info.vocab_size or self._tokenizer.token(token_id) is None:
                raise InvalidParameter("tokens", token_id, "a list of ids of the model's vocabulary")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizedText(text)

    def _prepare(self, body: ChatBody, params: SamplingParams) -> tuple[list[int], SamplingParams, OutputFormat]:
        """The prompt, what its answers are held to, and how to read them."""
        tools = [tool.for_template() for tool in body.offered_tools] or None
        text, prompt = self._chat_prompt(body.messages, tools, body.template)
        thinking = self._format.thinking(body, text)
        grammar = self._format.structured_outputs(body, thinking, params.structured_outputs, self._tokens)
        params = msgspec.structs.replace(params, structured_outputs=grammar)
        return prompt, params, self._format.output_format(body, thinking)

    def _chat_prompt(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, options: TemplateOptions
    ) -> tuple[str, list[int]]:
        """As text, and its tokens."""
        text = self._tokenizer.render_chat_template(
            [message.for_template() for message in messages],
            tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.variables,
        )
        return text, self._tokenizer.encode(text, add_special_tokens=False)

    def _params(self, body: GenerationBody) -> SamplingParams:
        params = body.sampling_params(self.info.default_sampling)
        params.check_vocabulary(self.info.vocab_size)
        for field in ("max_tokens", "min_tokens"):
            if (getattr(params, field) or 0) > self.info.max_model_len:
                limit = f"at most the model's context of {self.info.max_model_len} tokens"
                raise InvalidParameter(field, getattr(params, field), limit)
        if body.priority and not self.info.has_priorities:
            raise InvalidParameter("priority", body.priority, "0, since this server runs requests as they come")
        return msgspec.structs.replace(
            params, bad_words_token_ids=self._tokenizer.bad_words_token_ids(params.bad_words)
        )

    def _tokenize(self, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
        prompts, texts = [], []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                texts.append(prompt)
                prompts.append(self._tokenizer.encode(prompt, body.add_special_tokens))
            else:
                self._check_token_ids(prompt)
                texts.append(self._tokenizer.decode(prompt) if body.echo else "")
                prompts.append(prompt)
        return prompts, texts

    def _check_token_ids(self, prompt: list[int]) -> None:
        for token_id in prompt:
            if not 0 <= token_id < self.info.vocab_size:
                raise InvalidParameter("prompt", token_id, f"token ids from 0 to {self.info.vocab_size - 1}")

    def _generation(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        body: GenerationBody,
        meta: ResponseMeta,
        context: RequestContext,
    ) -> Generation:
        for prompt in prompts:
            if not prompt:
                raise InvalidParameter("prompt", "", "a text of at least one token")
            if len(prompt) >= self.info.max_model_len:
                raise PromptTooLong(len(prompt), self.info.max_model_len)
        if len(prompts) * body.n > MAX_SEQUENCES:
            raise InvalidParameter("n", body.n, f"at most {MAX_SEQUENCES // len(prompts)} with {len(prompts)} prompts")
        timeout_s = min(context.timeout_s or self.info.request_timeout_s, self.info.request_timeout_s)
        # the client may use one id twice; engines must never see two live requests of one id
        unique = f"{meta.id}-{secrets.token_hex(4)}"
        requests = [
            GenerateRequest(
                request_id=f"{unique}-{i * body.n + j}",
                prompt=prompt,
                params=params.sequence(j),
                reply_to=self._channel.address,
                timeout_s=timeout_s,
                priority=body.priority,
                cache_salt=body.cache_salt,
                session_id=context.session_id,
                model=self.info.identity,
            )
            for i, prompt in enumerate(prompts)
            for j in range(body.n)
        ]
        return Generation(
            requests,
            samples_per_prompt=body.n,
            tokenizer=self._tokens,
            channel=self._channel,
            pool=self.pool,
            model=self.info.name,
            stats=self._stats,
            timelines=self._timelines,
            admission=self.admission,
            client=context.client,
            max_replays=self.info.max_replays,
        )

"""One model of the API: from request bodies to answers that are ready to run."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.engine_pool import EnginePool
from deployments.generation import Generation
from deployments.openai.chat import ChatAnswer
from deployments.openai.completion import CompletionAnswer
from deployments.openai.header import Header
from deployments.openai.protocol import ChatBody, CompletionBody, GenerationBody
from deployments.token_channel import TokenChannel
from engine.errors import InvalidParameter, PromptTooLong
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

MAX_SEQUENCES = 1024  # of one HTTP request: prompts * n


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the API has to know of a model.

    name: under which it is served. folder: with its tokenizer. root: what the configuration calls it.
    default_sampling: by SamplingParams' names.
    request_timeout_s: after which a request is ended, wherever it is.
    """

    name: str
    root: str
    folder: str
    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, Any]
    request_timeout_s: float


class ServedModel:
    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, pool: EnginePool, channel: TokenChannel):
        self.info = info
        self.pool = pool
        self._tokenizer = tokenizer
        self._channel = channel

    async def chat(self, body: ChatBody, header: Header) -> ChatAnswer:
        """Raises RequestError."""
        params = self._params(body)
        prompt = await asyncio.to_thread(
            self._tokenizer.apply_chat_template,
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **body.chat_template_kwargs,
        )
        generation = self._generation([prompt], params, body, header)
        return ChatAnswer(header, body, generation, self._tokenizer)

    async def completion(self, body: CompletionBody, header: Header) -> CompletionAnswer:
        """Raises RequestError."""
        params = self._params(body)
        prompts, texts = await asyncio.to_thread(self._tokenize, body)
        if body.echo:
            params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
        generation = self._generation(prompts, params, body, header)
        return CompletionAnswer(header, body, generation, self._tokenizer, prompts, texts)

    def _params(self, body: GenerationBody) -> SamplingParams:
        params = body.sampling_params(self.info.default_sampling)
        params.check_vocabulary(self.info.vocab_size)
        if params.max_tokens is not None and params.max_tokens > self.info.max_model_len:
            limit = f"at most the model's context of {self.info.max_model_len} tokens"
            raise InvalidParameter("max_tokens", params.max_tokens, limit)
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
        self, prompts: list[list[int]], params: SamplingParams, body: GenerationBody, header: Header
    ) -> Generation:
        for prompt in prompts:
            if not prompt:
                raise InvalidParameter("prompt", "", "a text of at least one token")
            if len(prompt) >= self.info.max_model_len:
                raise PromptTooLong(len(prompt), self.info.max_model_len)
        if len(prompts) * body.n > MAX_SEQUENCES:
            raise InvalidParameter("n", body.n, f"at most {MAX_SEQUENCES // len(prompts)} with {len(prompts)} prompts")
        # the client may use one id twice; engines must never see two live requests of one id
        unique = f"{header.id}-{secrets.token_hex(4)}"
        requests = [
            GenerateRequest(
                request_id=f"{unique}-{i * body.n + j}",
                prompt=prompt,
                params=params.sequence(j),
                reply_to=self._channel.address,
                timeout_s=self.info.request_timeout_s,
                cache_salt=body.cache_salt,
            )
            for i, prompt in enumerate(prompts)
            for j in range(body.n)
        ]
        return Generation(
            requests, samples_per_prompt=body.n, tokenizer=self._tokenizer, channel=self._channel, pool=self.pool
        )

"""Finds requests that an engine could never serve, whatever its current load."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.features.adapter_slots import AdapterSlots, NoAdapterSlots
from engine.core.features.handoffs import HandoffManager
from engine.core.features.images.encoder_cache_manager import EncoderCacheManager, TextOnly
from engine.errors import InvalidParameter, PromptTooLong
from engine.wire.generate_request import GenerateRequest
from engine.wire.remote_request import RemoteRequest


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model that limit which requests it can serve."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    chunked_prefill: bool = True
    """Whether a prompt can be computed in several steps."""
    pools_all_tokens: bool = False
    """Whether pooling needs the hidden states of all prompt tokens."""


class RequestChecks:
    """Checks that raise RequestError for requests that this engine could never serve."""

    def __init__(
        self,
        limits: ModelLimits,
        images: EncoderCacheManager | TextOnly,
        handoffs: HandoffManager,
        adapters: AdapterSlots | NoAdapterSlots,
    ):
        self._limits, self._images, self._handoffs, self._adapters = limits, images, handoffs, adapters

    def check(self, message: GenerateRequest) -> None:
        params, pooling = message.params, message.pooling
        self._adapters.check(message.lora)
        self._check_tokens(message.prompt, message.num_prompt, answer=pooling is None)
        params.check_vocabulary(self._limits.vocab_size)
        given = 0 if message.num_prompt is None else len(message.prompt) - message.num_prompt
        if params.max_tokens is not None and given >= params.max_tokens:
            raise InvalidParameter(
                "max_tokens", params.max_tokens, f"above {given}, the number of output tokens that already exist"
            )
        self._images.check_images(message.mm_features, message.prompt[: message.num_prompt])
        whole = params.prompt_logprobs is not None or pooling is not None
        if message.prefill == "remote" and (whole or not self._handoffs.decides):
            raise InvalidParameter(
                "prefill", message.prefill, "auto or local, because no other engine can compute this prompt"
            )

    def check_remote(self, asked_by: RemoteRequest) -> None:
        self._adapters.check(asked_by.lora)
        self._check_tokens(asked_by.token_ids, asked_by.num_prompt)
        self._images.check_images(asked_by.mm_features, asked_by.token_ids[: asked_by.num_prompt])
        asked_by.params.check_vocabulary(self._limits.vocab_size)

    def _check_tokens(self, tokens: list[int], num_prompt: int | None, answer: bool = True) -> None:
        limits = self._limits
        if not tokens:
            raise InvalidParameter("prompt", tokens, "at least one token")
        if len(tokens) + answer > limits.max_model_len:
            raise PromptTooLong(len(tokens), limits.max_model_len, answer=answer)
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limits.vocab_size:
                raise InvalidParameter("prompt", token, f"token ids from 0 to {limits.vocab_size - 1}")
        if num_prompt is not None and not 1 <= num_prompt <= len(tokens):
            raise InvalidParameter("num_prompt", num_prompt, f"between 1 and the length of the prompt ({len(tokens)})")

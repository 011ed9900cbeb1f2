"""Finds requests that an engine could never serve, whatever its current load."""

from __future__ import annotations

from typing import Any

from engine.core.door.kernel import ModelLimits
from engine.core.door.part import Parts
from engine.core.request import Request
from engine.errors import InvalidParameter, PromptTooLong
from engine.wire.generate_request import GenerateRequest


class RequestChecks:
    """Checks that raise RequestError for requests that this engine could never serve."""

    def __init__(self, limits: ModelLimits, parts: Parts):
        self._limits, self._parts = limits, parts

    def check(self, message: GenerateRequest) -> None:
        params = message.params
        self._check_tokens(message.prompt, message.num_prompt, answer=self._parts.generates(message))
        given = 0 if message.num_prompt is None else len(message.prompt) - message.num_prompt
        if params.max_tokens is not None and given >= params.max_tokens:
            limit = f"above {given}, the number of output tokens that already exist"
            raise InvalidParameter("max_tokens", params.max_tokens, limit)
        if message.prefill == "remote" and not self._parts.takes("prefill"):
            raise not_elsewhere(message.prefill)
        self._check_parts(message, message.prompt[: message.num_prompt])

    def check_prompt(self, request: Request, asked: Any) -> None:
        self._check_tokens(request.tokens, request.num_prompt)
        self._check_parts(asked, request.tokens[: request.num_prompt])

    def _check_parts(self, asked: Any, prompt: list[int]) -> None:
        asked.params.check_vocabulary(self._limits.vocab_size)
        if lacking := sorted(asked.needs.keys() - {kind.part for kind in self._parts.asked}):
            raise InvalidParameter("needs", lacking[0], "left out: this engine lacks that part")
        for kind in self._parts.asked:
            asked.record(kind)
        if asked.params.structured_outputs is not None and not self._parts.takes("structured_outputs"):
            raise asked.params.structured_outputs.invalid("left out: this engine enforces no grammars")
        for check in self._parts.check:
            check(asked, prompt)

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


def not_elsewhere(prefill: str) -> InvalidParameter:
    """Return the error for a prompt that has to be computed by another engine and cannot be. prefill: the parameter."""
    return InvalidParameter("prefill", prefill, "auto or local, because no other engine can compute this prompt")

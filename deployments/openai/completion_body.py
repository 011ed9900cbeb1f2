"""Bodies of requests about texts and token ids: completions and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

from deployments.http.body import RequestBody, Whole
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from deployments.openai.sampling_body import GenerationBody
from engine.errors import InvalidParameter

MAX_SEQUENCES = 1024  # per HTTP request: prompts * n

T = TypeVar("T")
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: str | TokenIds | Prompts[str] | Prompts[TokenIds]
    """A text, token ids, or a list of either."""
    max_tokens: Whole = 16
    """May be 0 with `echo`, to get only the prompt's log-probabilities."""
    logprobs: Whole | None = None
    add_special_tokens: bool = True

    @property
    def echo_only(self) -> bool:
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """Return one or more non-empty prompts. Raises InvalidParameter."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts or not all(prompts):
            raise InvalidParameter("prompt", self.prompt, "a text, or token ids, that are not empty")
        return prompts

    def token_limit(self) -> int | None:
        return 1 if self.echo_only else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Return `prompt_logprobs`; with `echo`, at least `logprobs`, since an echo reports the prompt's
        log-probabilities too."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    foreign_fields = FOREIGN_FIELDS

    tokens: TokenIds

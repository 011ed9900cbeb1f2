"""What all parts of an answer say about the request it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.frontend.generation import Usage
from deployments.openai.responses import CompletionTokensDetails, PromptTokensDetails, UsageBody


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """created: in seconds since 1970."""

    id: str
    created: int
    model: str


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> UsageBody:
    """reasoning_tokens: None for a model that is not known to reason."""
    body = UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )
    if reasoning_tokens is not None:
        body.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
    return body

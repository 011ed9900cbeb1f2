"""The field by which a client limits reasoning."""

from __future__ import annotations

from pydantic import Field

from deployments.http.bodies import PartFields
from deployments.http.body import Whole
from deployments.openai.chat_body import ChatBody
from deployments.openai.sampling_body import INT32


class ThinkingFields(PartFields):
    kinds = (ChatBody,)

    thinking_token_budget: Whole | None = Field(default=None, ge=0, le=INT32)
    """Number of reasoning tokens after which the closing tag is forced, as in vLLM."""

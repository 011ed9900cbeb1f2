"""The end of a feature in a model that an application serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.billing.bill import Bill
from deployments.frontend.observers import GenerationObserver, RequestSize, SequenceObserver, SequenceView
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion_body import CompletionBody
from deployments.openai.formats.tool_grammar import Thinking
from deployments.openai.template_body import TokenizeBody
from engine.wire.generate_request import GenerateRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Draft:
    """The prompts of one HTTP request, on their way to the engine."""

    body: ChatBody | CompletionBody | TokenizeBody
    request_id: str
    session_id: str = ""
    timeout_s: float
    """Time limit of the request, in seconds."""
    text: str = ""
    """The conversation as the chat template has rendered it; empty for prompts without one."""
    thinking: Thinking = "never"
    """Whether the output begins with reasoning."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the body that have no effect."""
    of: dict[ModelPart, Any] = field(default_factory=dict)
    """What a part remembers of this request."""


class ModelPart:
    """All methods do nothing by default, so that a part overrides what it needs. `expand` and `requests` run in a
    thread, and may take long."""

    @property
    def input_modalities(self) -> Sequence[str]:
        """Kinds of input that the part adds to text, in OpenRouter's terms."""
        return ()

    def check(self) -> None:
        """Raise an error for an HTTP request that would be refused, before any work is done for it."""

    def check_prompts(self, num_tokens: int) -> None:
        """Raise an error for prompts of so many tokens together that could never run, though each of them might."""

    def share(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request to use in place of this one, which has what all requests of an HTTP request share."""
        return request

    async def load(self, draft: Draft) -> None:
        """Fetch what a conversation names, before it is rendered. Raises RequestError."""

    def expand(self, draft: Draft, text: str) -> str:
        """Return what is tokenized in place of the rendered conversation, or of its beginning. Raises RequestError."""
        return text

    def requests(self, draft: Draft, requests: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        """Return the requests to send in place of these. requests: for each prompt, those of its sequences. Raises
        RequestError."""
        return requests

    def observer(self, sequence: SequenceView) -> SequenceObserver | None:
        """Return what observes a sequence, or None for one that it does not observe."""
        return None

    def generation_observer(self, size: RequestSize, bill: Bill) -> GenerationObserver | None:
        """Return what observes the sequences of an HTTP request, or None for one that it does not observe."""
        return None

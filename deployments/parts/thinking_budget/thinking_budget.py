"""Limits how long a model may reason before it answers."""

from __future__ import annotations

import msgspec

from deployments.openai.chat_body import ChatBody
from deployments.openai.formats.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.formats.tool_grammar import Thinking
from deployments.openai.served.model_part import Draft, ModelPart
from deployments.parts.thinking_budget.fields import ThinkingFields
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget


class ThinkingBudgets(ModelPart):
    """The field `thinking_token_budget` of chats."""

    def __init__(self, chat_format: ChatFormat, markers: VisibleMarkers):
        self._format, self._markers = chat_format, markers

    def requests(self, draft: Draft, requests: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        body = draft.body
        if not isinstance(body, ChatBody) or not isinstance(body, ThinkingFields) or body.thinking_token_budget is None:
            return requests
        budget = self._budget(body, body.thinking_token_budget, draft.thinking)
        if budget is None:
            draft.ignored.append("thinking_token_budget")
            return requests
        return [[_with_budget(request, budget) for request in sequences] for sequences in requests]

    def _budget(self, body: ChatBody, num_tokens: int, thinking: Thinking) -> ThinkingBudget | None:
        """Return the reasoning budget for the engine; None if it cannot be enforced, because a tag is not a single
        token or the reasoning can end without its closing tag."""
        tags, calls, ids = self._format.reasoning_tags, self._format.calls, self._markers.ids
        if tags is None:
            return None
        opening, closing = ids.get(tags.opens[0]), ids.get(tags.closes[0])
        call: int | None = None
        if body.offered_tools and calls is not None and calls.markup is not None:
            markup = calls.markup
            call = next(filter(None, map(ids.get, (*markup.opens, markup.call, *markup.inner))), None)
            if call is None:
                return None
        if opening is None or closing is None:
            return None
        return ThinkingBudget(num_tokens, closing, None if thinking == "begun" else opening, call)


def _with_budget(request: GenerateRequest, budget: ThinkingBudget) -> GenerateRequest:
    params = msgspec.structs.replace(request.params, extra_args=request.params.extra_args | encoded(budget))
    return msgspec.structs.replace(request, params=params)

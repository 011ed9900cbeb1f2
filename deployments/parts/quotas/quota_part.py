"""The limits of API keys in an application, and in the requests of a model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.middleware import Middleware

from deployments.billing.bill import Bill
from deployments.edge_part import EdgePart
from deployments.frontend.observers import GenerationObserver, RequestSize
from deployments.openai.served.model_part import ModelPart
from deployments.parts.quotas.middleware import QuotaMiddleware
from deployments.quotas.key_quota import current_quota, observe_generation
from deployments.quotas.quotas import Quotas
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import ReportCost


class QuotaEdge(EdgePart):
    def __init__(self, quotas: Quotas):
        self._quotas = quotas

    def middleware(self) -> Sequence[Middleware]:
        return (Middleware(QuotaMiddleware, self._quotas),)


class QuotaChecks(ModelPart):
    def __init__(self, *, has_priorities: bool):
        """has_priorities: whether the engines schedule by priority."""
        self._has_priorities = has_priorities

    def check(self) -> None:
        """Raises QuotaExceeded."""
        if (quota := current_quota()) is not None:
            quota.check()

    def check_prompts(self, num_tokens: int) -> None:
        """Raises PromptExceedsLimit."""
        if (quota := current_quota()) is not None:
            quota.check_prompt(num_tokens)

    def share(self, request: GenerateRequest) -> GenerateRequest:
        if (quota := current_quota()) is None:
            return request
        priority = quota.lowered(request.priority) if self._has_priorities else 0
        asked = request.asking(ReportCost() if quota.watches_cost else None)
        return msgspec.structs.replace(asked, priority=priority)

    def generation_observer(self, size: RequestSize, bill: Bill) -> GenerationObserver | None:
        return observe_generation(size, bill)

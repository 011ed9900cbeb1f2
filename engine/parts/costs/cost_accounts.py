"""Opens the account of each request."""

from __future__ import annotations

from engine.core.door.part import Part
from engine.core.request import Request
from engine.costs.request_cost import cost_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.remote_request import RemoteRequest


class CostAccounts(Part):
    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if isinstance(asked, GenerateRequest):
            cost = cost_of(request)
            cost.known, cost.reported = len(request.tokens) if request.num_output else 0, asked.report_cost

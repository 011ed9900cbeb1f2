"""Opens the account of each request."""

from __future__ import annotations

from engine.core.door.part import Part
from engine.core.request import Request
from engine.costs.request_cost import cost_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import ReportCost
from engine.wire.remote_request import RemoteRequest


class CostAccounts(Part):
    asks = ReportCost

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if isinstance(asked, GenerateRequest):
            cost = cost_of(request)
            cost.known = len(request.tokens) if request.num_output else 0
            cost.reported = asked.record(ReportCost) is not None

"""Notes which requests an engine computes."""

from __future__ import annotations

from engine.black_box import BLACK_BOX, compute_key
from engine.core.door.part import Part
from engine.core.request import Request


class NotedRequests(Part):
    def started(self, request: Request) -> None:
        BLACK_BOX.begin(compute_key(request.request_id))

    def stopped(self, request: Request) -> None:
        BLACK_BOX.end(compute_key(request.request_id))

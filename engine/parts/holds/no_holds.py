"""An engine that keeps no holds, and says so."""

from __future__ import annotations

from engine.core.door.part import Part
from engine.core.request import Request
from engine.parts.holds.hold_table import refused
from engine.parts.holds.request_holds import RequestHolds
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.holds import PromptHold
from engine.wire.remote_request import RemoteRequest

WHY = "this server keeps no holds (max_held_share is 0, or prefix caching is off)"


class NoHolds(Part):
    asks = PromptHold

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        marks = RequestHolds.of(asked, request.num_prompt).marks
        request.news += [refused(mark, "off", WHY) for mark in marks]

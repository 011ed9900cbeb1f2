"""Makes an engine's notes of what it computes."""

from __future__ import annotations

from engine.parts.black_box.noted_requests import NotedRequests
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    return Made([NotedRequests()])

"""The tape of an engine."""

from __future__ import annotations

from engine.wire.messages import Question


class TakeTape(Question, frozen=True):
    """Ask for the tape (parts/tape/). Answered by bytes: an EngineTape in msgpack, whose hashes have no key; empty if
    the engine records none."""

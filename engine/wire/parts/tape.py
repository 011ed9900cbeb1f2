"""The tape of an engine."""

from __future__ import annotations

from engine.wire.messages import Command, Notice


class TakeTape(Command, frozen=True):
    """Ask for the tape (parts/tape/). Answered by TapeTaken."""

    call_id: str


class TapeTaken(Notice, frozen=True):
    """Answers TakeTape."""

    call_id: str
    tape: bytes
    """An EngineTape in msgpack, whose hashes have no key; empty if the engine records none."""

"""What carries messages between a part of a scheduler and its other end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from engine.core.door.inputs import Input
from engine.core.door.outputs import Receiver
from engine.wire.generate_request import GenerateRequest

TakeMessages = Callable[[Receiver], list[Any]]
"""Returns what a scheduler has for a receiver, oldest first."""


class Courier:
    """Carries the messages of one part. Used by the thread of the step loop."""

    notices: list[msgspec.Struct]
    """Where messages for the control actor go."""
    came: threading.Event
    """What may be set, from any thread, when something has come."""

    @property
    def is_awaited(self) -> bool:
        """Whether something is on its way that lets a request start or go on."""
        return False

    def check(self, message: GenerateRequest, now: float) -> None:
        """Raise ServingError if what a request refers to cannot be used. May wait for it."""

    def arrived(self, now: float) -> Iterable[Input]:
        """Return what has come since the last call. Raises EngineUnavailable if nothing can come any more."""
        return ()

    def deliver(self, take: TakeMessages) -> None:
        """Deliver what may go now."""

    def step_ended(self) -> None:
        """A step has been planned and another recorded."""

    def flushed(self) -> bool:
        """Return whether nothing is left to be delivered before the engine ends."""
        return True

    def close(self) -> None:
        """Stop."""

"""What carries messages between a part of a scheduler and its other end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from engine.core.door.inputs import Input
from engine.core.door.journal import Journal
from engine.core.door.kernel import Kernel
from engine.core.door.outputs import Receiver
from engine.core.output import Event
from engine.wire.generate_request import GenerateRequest

TakeMessages = Callable[[Receiver], list[Any]]
"""Returns what a scheduler has for a receiver, oldest first."""


class Engine(Protocol):
    """An EngineCore, as couriers see it."""

    idle: bool
    journal: Journal

    @property
    def scheduler(self) -> Kernel: ...
    def apply(self, given: Input) -> Any: ...
    def admit(self, given: Input) -> None: ...


class Server(Protocol):
    """What serves an engine, as couriers see it while they carry out commands."""

    @property
    def core(self) -> Engine: ...
    def tell(self, notice: msgspec.Struct) -> None:
        """Send a message to the control actor."""

    def admitted(self, name: str) -> None:
        """Tell routers of work that has come."""

    def ended(self, name: str) -> None:
        """Tell routers and the control actor that work has ended."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def make_way(self) -> None:
        """Abort the request, if any, that is served only while there is no other."""

    def report_soon(self) -> None:
        """Let the next status go out at once."""


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

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        """Carry out a command from outside. Returns False if it is not for this part."""
        return False

    def arrived(self, now: float) -> Iterable[Input]:
        """Return what has come since the last call. Raises EngineUnavailable if nothing can come any more."""
        return ()

    def deliver(self, take: TakeMessages) -> None:
        """Deliver what may go now."""

    def step_ended(self) -> None:
        """A step has been planned and another recorded."""

    def seen(self, event: Event) -> None:
        """A request has got this."""

    def status(self, core: Engine) -> dict[str, Any]:
        """Return fields of EngineStatus. Lists and counts of several couriers are joined."""
        return {}

    def flushed(self) -> bool:
        """Return whether nothing is left to be delivered before the engine ends."""
        return True

    def close(self) -> None:
        """Stop."""

"""Carries messages between a scheduler's parts and their other ends: engines, tiers, adapters, the control actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.core.door.inputs import Input, TimePassed
from engine.core.mail.courier import Courier
from engine.core.scheduler import Scheduler
from engine.hooks import ByClass
from engine.wire.generate_request import GenerateRequest

FLUSH_S = 5.0  # that `flush` waits
FLUSH_POLL_S = 0.002


class Mail(ByClass[Courier]):
    """Delivers what parts send, and gives what comes for them. Used by the thread of the step loop."""

    def __init__(self, scheduler: Scheduler, couriers: Sequence[Courier] = (), came: threading.Event | None = None):
        """couriers: in the order in which they are asked. came: what they set when something has come."""
        super().__init__(couriers)
        self._scheduler, self._came = scheduler, came or threading.Event()
        self._notices: list[msgspec.Struct] = []
        for courier in couriers:
            courier.notices, courier.came = self._notices, self._came

    @property
    def is_awaited(self) -> bool:
        """Whether something is on its way that lets a request start or go on."""
        return any(courier.is_awaited for courier in self.all)

    def check(self, message: GenerateRequest, now: float) -> None:
        """Raise ServingError if what a request refers to cannot be used. Waits for it."""
        for courier in self.all:
            courier.check(message, now)

    def arrived(self, now: float) -> Iterator[Input]:
        """Yield what has come since the last call, in the order in which the scheduler must be given it. Raises
        EngineUnavailable."""
        for courier in self.all:
            yield from courier.arrived(now)

    def wait(self, seconds: float) -> None:
        """Wait until something comes, for so long at most."""
        self._came.wait(seconds)
        self._came.clear()

    def deliver(self) -> None:
        """Deliver what may go now. Messages for the control actor are kept for `take_notices`."""
        take = self._scheduler.take_messages
        for courier in self.all:
            courier.deliver(take)
        self._notices += take("control")

    def step_ended(self) -> None:
        for courier in self.all:
            courier.step_ended()

    def flush(self, now: Callable[[], float]) -> None:
        """Deliver what must not be lost with this engine. Takes FLUSH_S at most. now: the engine's clock."""
        deadline = now() + FLUSH_S
        while now() < deadline:
            for given in (*self.arrived(now()), TimePassed()):
                self._scheduler.apply(given, now())
            self.deliver()
            if all(courier.flushed() for courier in self.all):
                return
            time.sleep(FLUSH_POLL_S)

    def close(self) -> None:
        for courier in self.all:
            courier.close()

    def take_notices(self) -> list[msgspec.Struct]:
        """Return the messages for the control actor since the last call."""
        notices = [*self._notices]
        self._notices.clear()
        return notices

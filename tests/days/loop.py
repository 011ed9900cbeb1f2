"""An asyncio loop whose time is simulated: it waits for nothing, and jumps to the next timer."""

from __future__ import annotations

import asyncio
from typing import Any


class StandstillError(AssertionError):
    """Everything waits, and no timer is set."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in one thread, in the order of their times. The same program gives the same order every time."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._selector = self
        self._clock_resolution = 1e-9  # type: ignore[assignment]
        self.failure: BaseException | None = None  #: first exception that nobody has caught
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        return self._virtual_now

    def fail(self, error: BaseException) -> None:
        """End `run_until` with this error."""
        self.failure = self.failure or error
        self.stop()

    def run_until(self, future: asyncio.Future[Any]) -> None:
        """Run until the future is done. Raises what it raises, and the first exception in any callback before."""
        future.add_done_callback(lambda _: self.stop())
        self.run_forever()
        if self.failure is not None:
            raise self.failure
        future.result()

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.fail(context.get("exception") or AssertionError(context["message"]))

    # what BaseEventLoop asks of a selector and of its subclasses

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise StandstillError("nothing will ever happen again")
        if timeout > 0:
            self._virtual_now = max(self._virtual_now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

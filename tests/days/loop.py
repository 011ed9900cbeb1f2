"""An asyncio loop whose time is simulated: it waits for nothing, and jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from typing import Any


class StandstillError(AssertionError):
    """Everything waits, and no timer is set."""


class Timer:
    """Has the methods of TimerHandle that callers use, and costs half."""

    __slots__ = ("_args", "_callback", "_when")

    def __init__(self, when: float, callback: Callable[..., Any], args: tuple[Any, ...]):
        self._when, self._callback, self._args = when, callback, args

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._callback = _nothing

    def cancelled(self) -> bool:
        return self._callback is _nothing


def _nothing(*_: Any) -> None: ...


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in one thread, in the order of their times. The same program gives the same order every time."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []  # heap; those of the same time in the order of their calls
        self._num_timers = 0
        self.failure: BaseException | None = None  #: first exception that nobody has caught
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        return self._virtual_now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        return self.add(Timer(when, callback, args))

    def add(self, timer: Timer) -> Timer:
        self._num_timers += 1
        heapq.heappush(self._timers, (timer._when, self._num_timers, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        return self.call_at(self._virtual_now + delay, callback, *args)

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

    # in place of methods of BaseEventLoop

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise StandstillError("nothing will ever happen again")
            when, _, timer = heapq.heappop(timers)
            callback, timer._callback = timer._callback, _nothing
            if callback is _nothing:
                continue
            if when > self._virtual_now:
                self._virtual_now = when
            try:
                callback(*timer._args)
            except Exception as error:  # noqa: BLE001 - as a handle does
                self.fail(error)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

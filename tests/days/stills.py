"""Ingresses that stand still for a while, as processes do that wait for memory or whose machine moves. What arrives
meanwhile waits in their sockets, and what is due runs when they go on."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.days.loop import Timer, VirtualLoop
from tests.days.part import Part

if TYPE_CHECKING:
    from tests.days.day import Day
    from tests.days.world import World

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process whose code runs. None for what cannot stand still."""
BEHIND_S = 5.0  # after it goes on, in which a process may act on what it has known before


class Process:
    def __init__(self, loop: StillLoop):
        self._loop, self.still = loop, False
        self.num_stops, self.went_on_at = 0, float("-inf")
        self._arrived: list[asyncio.Handle] = []
        self._due: list[asyncio.Handle] = []

    @property
    def is_behind(self) -> bool:
        """Whether others may have taken it for dead, and it may not know that yet."""
        return self.still or self._loop.time() < self.went_on_at + BEHIND_S

    def stop(self) -> None:
        ready = self._loop._ready  # type: ignore[attr-defined]
        self.still, self.num_stops = True, self.num_stops + 1
        for handle in list(ready):
            if handle._context.get(PROCESS) is self:
                ready.remove(handle)
                self._arrived.append(handle)

    def go_on(self) -> None:
        self.still, self.went_on_at = False, self._loop.time()
        self._loop._ready.extend([*self._arrived, *self._due])  # type: ignore[attr-defined]
        self._arrived, self._due = [], []

    def arrive(self, handle: asyncio.Handle) -> None:
        """Keep something for when the process goes on."""
        self._arrived.append(handle)

    def take(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call this with a message, now or when the process goes on."""
        if self.still:
            self._arrived.append(asyncio.Handle(callback, args, self._loop, contextvars.copy_context()))
        else:
            callback(*args)

    def be_due(self, timer: StillTimer, callback: Callable[..., Any], *args: Any) -> None:
        if self.still:
            timer.parked = asyncio.Handle(callback, args, self._loop, contextvars.copy_context())
            self._due.append(timer.parked)
        else:
            callback(*args)


class StillTimer(Timer):
    __slots__ = ("parked",)
    parked: asyncio.Handle | None

    def cancel(self) -> None:
        super().cancel()
        if self.parked is not None:
            self.parked.cancel()


class StillLoop(VirtualLoop):
    """A loop in which processes can stand still: it keeps their callbacks until they go on."""

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        handle = asyncio.Handle(callback, args, self, context)
        if process is not None and process.still:
            process.arrive(handle)
        else:
            self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args)
        timer = StillTimer(when, callback, args)
        timer.parked = None
        timer._callback, timer._args = process.be_due, (timer, callback, *args)
        return self.add(timer)


def in_process(process: Process | None, call: Callable[..., Any], *args: Any) -> Any:
    """Call something as the code of a process: so are the tasks that it creates."""
    if process is None:
        return call(*args)
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    return context.run(call, *args)


def guarded(take: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes messages for the process whose code runs now."""
    process = PROCESS.get()
    return take if process is None else partial(process.take, take)


@dataclass(frozen=True)
class Stills:
    """Says that faults of a day may be `stand still`."""

    def open(self, world: World) -> Part:
        return Part()


def add(day: Day, rng: random.Random) -> Day:
    """Let ingresses stand still on some days."""
    from tests.days.day import Fault

    has_keys = any(ask.key for ask in day.asks)
    if day.is_calm or day.only_losses or rng.random() < (0.6 if has_keys else 0.9):
        return day
    length_s = max(ask.at for ask in day.asks) + 2.0
    faults = [
        Fault(
            rng.uniform(0, length_s),
            "stand still",
            rng.randrange(100),
            rng.randrange(100),
            rng.choice([0.3, 3.0, 9.0, rng.uniform(10.0, 16.0)]),
        )
        for _ in range(rng.choice([1, 2, 4]))
    ]
    if has_keys:  # it goes on with answers that another one has taken over meanwhile
        for fault in [fault for fault in faults if rng.random() < 0.7]:
            at, seconds = rng.uniform(0, length_s), rng.uniform(10.5, 16.0)
            faults.append(replace(fault, at=at, seconds=seconds, moment="computes a key"))
            faults.append(Fault(at + rng.uniform(0, 8.0), "kill engine", rng.randrange(100), 0, 0.0, "runs"))
    return replace(day, faults=(*day.faults, *faults), parts=(*day.parts, Stills()))

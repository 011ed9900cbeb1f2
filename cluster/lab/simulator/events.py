"""The event loop on the simulated clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from cluster.lab.simulator.replica import Replica

STEP, MESSAGE, TIMER = 0, 1, 2  # kinds of events, in their order at the same moment


class EventLoop:
    """Runs the steps of replicas, and messages between them, in order of time."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the start of the simulation
        self.heap: list[tuple[float, int, int, Any, tuple[Any, ...]]] = []  # (time, kind, number, target, arguments)
        self._count = 0
        self._due: dict[Replica, float | None] = {}

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a message for this time."""
        self._push(when, MESSAGE, call, args)

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._push(self.now + seconds, TIMER, call, args)

    def watch(self, replica: Replica) -> None:
        """Schedule the replica's next step. Call it whenever the replica's `due` may have changed."""
        if replica.due is not None and replica.due != self._due.get(replica):
            self._push(replica.due, STEP, replica, ())
        self._due[replica] = replica.due

    @property
    def next_at(self) -> float | None:
        return self.heap[0][0] if self.heap else None

    def step(self) -> Replica | None:
        """Process the next event. Returns the replica if one was woken, else None."""
        self.now, kind, _, target, args = heapq.heappop(self.heap)
        if kind != STEP:
            target(*args)
            return None
        replica: Replica = target
        if replica.due != self.now:
            return None  # obsolete, because its fast-forward was cut short
        replica.wake(self.now)
        return replica

    def _push(self, when: float, kind: int, target: Any, args: tuple[Any, ...]) -> None:
        self._count += 1
        heapq.heappush(self.heap, (when, kind, self._count, target, args))

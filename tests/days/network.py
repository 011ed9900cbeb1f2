"""Links between the processes of a simulated cluster."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.days.loop import VirtualLoop

MIN_S, MAX_S = 0.0002, 0.003  # usual delay of a message
LATE = 0.01  # share of other messages that take up to `late_s`


class Network:
    """Messages between nodes, each a call at its receiver.

    `send` is a connection over TCP: in order, and late where the nodes are cut off from each other. A connection that
    breaks loses what is sent meanwhile. `datagram` may also lose, repeat and overtake: what the handoff protocol says
    that it bears.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random):
        self._loop, self._rng = loop, rng
        self._last: dict[tuple[str, str, str], float] = {}  # when the newest message of a connection arrives
        self._cut: dict[frozenset[str], float] = {}  # two nodes -> until when they do not hear each other
        self._broken: dict[tuple[str, str, str], float] = {}  # connections that lose messages -> until when
        self.loss = self.repeats = 0.0  #: shares of datagrams
        self.late_s, self.late = 1.0, LATE  #: longest delay, and the share of datagrams that are late
        self.seen: Counter[str] = Counter()

    def cut(self, a: str, b: str, seconds: float) -> None:
        self._cut[frozenset((a, b))] = self._loop.time() + seconds

    def break_link(self, source: str, target: str, kind: str, seconds: float) -> None:
        self._broken[source, target, kind] = self._loop.time() + seconds

    def healed_at(self, a: str, b: str) -> float:
        """Return when two nodes hear each other again, or a time that has passed."""
        return self._cut.get(frozenset((a, b)), 0.0)

    def delay(self, late: float = LATE) -> float:
        if self._rng.random() < late:
            return self._rng.uniform(MAX_S, self.late_s)
        return self._rng.uniform(MIN_S, MAX_S)

    def send(self, source: str, target: str, kind: str, call: Callable[..., Any], *args: Any) -> None:
        """source, target: nodes. kind: name of the connection between them."""
        now, key = self._loop.time(), (source, target, kind)
        if self._broken.get(key, 0.0) > now:
            self.seen[f"lost {kind.partition(' ')[0]}"] += 1
            return
        at = max(now, self.healed_at(source, target)) + self.delay()
        at = self._last[key] = max(at, self._last.get(key, 0.0) + 1e-6)  # a heap does not keep the order of equal times
        self._loop.call_at(at, call, *args)

    def datagram(self, source: str, target: str, call: Callable[..., Any], *args: Any) -> None:
        now = self._loop.time()
        if self.healed_at(source, target) > now or self._rng.random() < self.loss:
            self.seen["lost datagram"] += 1
            return
        self._loop.call_at(now + self.delay(self.late), call, *args)
        if self._rng.random() < self.repeats:
            self.seen["repeated datagram"] += 1
            self._loop.call_at(now + self.delay(self.late), call, *args)

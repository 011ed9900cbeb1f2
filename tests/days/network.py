"""Links between the processes of a simulated cluster."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.days.loop import VirtualLoop

MIN_S, MAX_S = 0.0002, 0.003  # usual delay of a message
BUSY_S = 0.6  # longest delay of an answer of a busy replica
DEAF = 0.9  # share of the datagrams that a node loses for a while
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
        self._slow: dict[tuple[str, str, str], float] = {}  # connections whose messages do not arrive -> until when
        self._deaf: dict[str, tuple[float, float]] = {}  # node -> from when and until when it loses most datagrams
        self.loss = self.repeats = 0.0  #: shares of datagrams
        self.busy = 0.0  #: share of the reports to routers that a full queue drops, and of the answers that are late
        self.late_s, self.late = 1.0, LATE  #: longest delay, and the share of datagrams that are late
        self.seen: Counter[str] = Counter()

    def cut(self, a: str, b: str, seconds: float) -> None:
        self._cut[frozenset((a, b))] = self._loop.time() + seconds

    def break_link(self, source: str, target: str, kind: str, seconds: float) -> None:
        self._broken[source, target, kind] = self._loop.time() + seconds

    def stop_link(self, source: str, target: str, kind: str, seconds: float) -> None:
        """Let what is sent meanwhile arrive only then."""
        self._slow[source, target, kind] = self._loop.time() + seconds

    def deafen(self, node: str, start: float, end: float) -> None:
        """Let most datagrams from and to a node get lost meanwhile, as when a machine moves to another host."""
        self._deaf[node] = start, end

    def _is_deaf(self, *nodes: str) -> bool:
        spans = [self._deaf.get(node, (0.0, 0.0)) for node in nodes]
        return any(start <= self._loop.time() < end for start, end in spans) and self._rng.random() < DEAF

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
        dropped = self.busy and " router:" in kind and self._rng.random() < self.busy
        if dropped or self._broken.get(key, 0.0) > now:
            self.seen[f"lost {kind.partition(' ')[0]}"] += 1
            return
        at = max(now, self.healed_at(source, target), self._slow.get(key, 0.0)) + self.delay()
        if self.busy and kind.startswith("answer ") and self._rng.random() < self.busy:
            at += self._rng.uniform(0, BUSY_S)
        at = self._last[key] = max(at, self._last.get(key, 0.0) + 1e-6)  # a heap does not keep the order of equal times
        self._loop.call_at(at, call, *args)

    def datagram(self, source: str, target: str, call: Callable[..., Any], *args: Any) -> None:
        now = self._loop.time()
        if self.healed_at(source, target) > now or self._rng.random() < self.loss or self._is_deaf(source, target):
            self.seen["lost datagram"] += 1
            return
        self._loop.call_at(now + self.delay(self.late), call, *args)
        if self._rng.random() < self.repeats:
            self.seen["repeated datagram"] += 1
            self._loop.call_at(now + self.delay(self.late), call, *args)

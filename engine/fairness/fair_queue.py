"""Chooses the next request when there are more requests than can run. In an ingress, these are requests for an engine;
in an engine, grammars to compile, whose cost is counted in characters. Pure: no clock, no tasks.

Fairness is the Virtual Token Counter of arXiv:2401.00588: every client has a counter of the tokens served to it, and
the client with the smallest counter is next. A client that returns starts no lower than the clients that kept waiting,
so it gains nothing by its absence. No capacity is reserved for any client.

Tokens are only an estimate, since some cost much more time than others: a cached prompt costs almost nothing, and a
decode in a small batch costs as much as many tokens of a prompt. When a request has ended, its client is charged with
the time that it has really taken instead, in tokens of average cost.

When the queue is full, a new request replaces the newest requests of the client that fills most of the queue. So a
client that floods the queue loses its own requests, and a client with few requests is always admitted. If there are no
other clients, the new request itself is refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token costs; the paper's values
FADES = 0.02  # weight of a request in the mean cost of a token


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One HTTP request in the queue."""

    client: str
    sequences: int
    prompt_tokens: int  #: total of all its prompts
    state: Literal["new", "waiting", "running", "gone"] = "new"
    charged: float = 0.0  #: weighted tokens so far
    account: _Client | None = None  #: set when it starts


@dataclass(slots=True)
class _Client:
    served: float  # weighted tokens
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    num_running: int = 0  # requests

    def load(self, up_to: int | None = None) -> tuple[int, int]:
        """Return the sequences and prompt tokens of its oldest `up_to` waiting requests, or of all."""
        queued = list(self.waiting)[:up_to]
        return sum(t.sequences for t in queued), sum(t.prompt_tokens for t in queued)


class FairQueue:
    """Waiting and running requests of all clients. The number of running sequences is limited by the window.

    A request starts as a whole as soon as the window is not full, so the last request to start may exceed the window.
    """

    def __init__(self, window: int, max_waiting: int, max_waiting_tokens: int):
        """max_waiting, max_waiting_tokens: maximum number of waiting sequences, and of their prompt tokens. A request
        that waits alone may exceed both."""
        self.window = window  #: sequences that may run at once; may be changed at any time
        self.num_waiting = self.num_running = self.waiting_tokens = 0  # sequences, sequences, tokens
        self._max_waiting, self._max_tokens = max_waiting, max_waiting_tokens
        self._clients: dict[str, _Client] = {}
        self._floor = 0.0  # counter of the client served last, before it was charged
        self._mean_tokens = self._mean_s = 0.0  # of recent requests that have ended

    def is_full_for(self, client: str) -> bool:
        """Return whether even a request of one sequence and no tokens would be refused."""
        return self.num_running >= self.window and self._find_victims(QueuedRequest(client, 1, 0)) is None

    def offer(self, queued: QueuedRequest) -> list[QueuedRequest] | None:
        """Queue a request. Returns the requests dropped to make room for it, or None if it is refused itself."""
        dropped = self._find_victims(queued)
        if dropped is None:
            return None
        for other in dropped:
            self.leave(other)
        client = self._clients.setdefault(queued.client, _Client(self._floor))
        if not client.waiting:
            client.served = max(client.served, self._floor)
        client.waiting.append(queued)
        queued.state = "waiting"
        self.num_waiting += queued.sequences
        self.waiting_tokens += queued.prompt_tokens
        return dropped

    def start(self) -> list[QueuedRequest]:
        """Remove from the queue, and return, the requests that may run now."""
        started = []
        while self.num_running < self.window and self.num_waiting:
            # dicts keep insertion order: among equals, this picks the client that has been here longest
            client = min((c for c in self._clients.values() if c.waiting), key=lambda c: c.served)
            queued = client.waiting.popleft()
            self._no_longer_waits(queued)
            queued.state = "running"
            client.num_running += 1
            queued.account = client
            self._floor = client.served
            self._charge(queued, PROMPT_WEIGHT * queued.prompt_tokens)
            self.num_running += queued.sequences
            started.append(queued)
        return started

    def charge(self, queued: QueuedRequest, output_tokens: int) -> None:
        """Count output tokens of a running request against its client."""
        self._charge(queued, OUTPUT_WEIGHT * output_tokens)

    def settle(self, queued: QueuedRequest, seconds: float) -> None:
        """Charge a request that has ended, and may have left, with the time that it has taken instead of its tokens. If
        its client has been without requests since, its counter is gone, and nothing is charged."""
        known = self._mean_tokens > 0
        self._mean_tokens += (FADES if known else 1.0) * (queued.charged - self._mean_tokens)
        self._mean_s += (FADES if known else 1.0) * (seconds - self._mean_s)
        if self._mean_s > 0 and self._clients.get(queued.client) is queued.account:
            self._charge(queued, seconds * self._mean_tokens / self._mean_s - queued.charged)

    def _charge(self, queued: QueuedRequest, tokens: float) -> None:
        queued.charged += tokens
        self._clients[queued.client].served += tokens

    def leave(self, queued: QueuedRequest) -> None:
        """Remove a request, waiting or running. Does nothing if it has already left."""
        client = self._clients.get(queued.client)
        if client is None or queued.state not in ("waiting", "running"):
            return
        if queued.state == "waiting":
            client.waiting.remove(queued)
            self._no_longer_waits(queued)
        else:
            client.num_running -= 1
            self.num_running -= queued.sequences
        queued.state = "gone"
        if not client.waiting and not client.num_running:
            del self._clients[queued.client]

    def _no_longer_waits(self, queued: QueuedRequest) -> None:
        self.num_waiting -= queued.sequences
        self.waiting_tokens -= queued.prompt_tokens

    def _find_victims(self, queued: QueuedRequest) -> list[QueuedRequest] | None:
        """Return the requests to drop for a new one; None if its own client fills most of the queue."""
        sequences, tokens = self.num_waiting + queued.sequences, self.waiting_tokens + queued.prompt_tokens
        if not self._over(sequences, tokens) or not self.num_waiting:
            return []
        own = self._clients.get(queued.client)
        own_sequences, own_tokens = own.load() if own else (0, 0)
        newcomer = self._fraction(own_sequences + queued.sequences, own_tokens + queued.prompt_tokens)
        kept = {name: len(c.waiting) for name, c in self._clients.items() if name != queued.client}
        dropped: list[QueuedRequest] = []
        while self._over(sequences, tokens):
            fractions = {
                name: self._fraction(*self._clients[name].load(count)) for name, count in kept.items() if count
            }
            largest = max(fractions, key=lambda name: fractions[name], default=None)
            if largest is None or fractions[largest] <= newcomer:
                return None
            kept[largest] -= 1
            victim = self._clients[largest].waiting[kept[largest]]
            sequences, tokens = sequences - victim.sequences, tokens - victim.prompt_tokens
            dropped.append(victim)
        return dropped

    def _over(self, sequences: int, tokens: int) -> bool:
        return sequences > self._max_waiting or tokens > self._max_tokens

    def _fraction(self, sequences: int, tokens: int) -> float:
        """Return the fraction of the queue that these sequences or these tokens fill, whichever is larger."""
        return max(sequences / self._max_waiting, tokens / self._max_tokens)

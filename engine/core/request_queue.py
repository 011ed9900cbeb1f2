"""The live requests of one scheduler, by state. Pure Python."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from engine.core.request import Request, State


class RequestQueue:
    """Keeps live requests in one collection per state, and gives each running request a slot.

    The scheduler decides which request moves; the queue only moves it. Live requests also include those that parts
    keep: their KV comes from elsewhere, or others read it.
    """

    def __init__(self, max_num_seqs: int, stopped: Sequence[Callable[[Request], None]] = ()):
        """stopped: called with each request that has lost its slot."""
        self.max_num_seqs, self._stopped = max_num_seqs, stopped
        #: All live requests, by id.
        self.live: dict[str, Request] = {}
        #: Sorted by `Request.order`.
        self.waiting: list[Request] = []
        #: Sorted by `Request.order`.
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def waiting_with_kv(self) -> list[Request]:
        """Waiting requests whose KV has come from another engine, so that they need only a slot."""
        return [request for request in self.waiting if request.tables]

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(request.queued_tokens for request in [*self.waiting, *self.running])

    def add(self, request: Request) -> None:
        """Add a new request."""
        assert request.request_id not in self.live
        self.live[request.request_id] = request
        self.wait(request)

    def wait(self, request: Request) -> None:
        request.state, request.expected = State.WAITING, 0
        insort(self.waiting, request, key=lambda r: r.order)

    def overtake(self, request: Request, tokens: int) -> None:
        """Record that a waiting request gets blocks before earlier ones that have none. tokens: those to compute."""
        for earlier in self.waiting:
            if earlier.order >= request.order:
                return
            if not earlier.tables:
                earlier.overtaken += tokens

    def run(self, request: Request) -> None:
        """Move a waiting request into a free slot."""
        self.waiting.remove(request)
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        insort(self.running, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        """Remove a request from its collection and its slot. It stays live, and keeps its blocks and its state."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = -1
            for stopped in self._stopped:
                stopped(request)

    def check(self, kept: list[Request]) -> None:
        """Raise AssertionError if a request or a slot is lost. kept: the live requests that parts keep."""
        elsewhere = (State.WAITING_FOR_REMOTE_KV, State.LEASED, State.LOADING_KV)
        by_state = {State.RUNNING: self.running, State.WAITING: self.waiting} | {
            state: [request for request in kept if request.state is state] for state in elsewhere
        }
        assert len(self.live) == sum(map(len, by_state.values())), "a request is lost"
        for state, requests in by_state.items():
            assert all(request.state is state for request in requests), (
                f"a request in the collection for {state.value} has another state"
            )
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), "a slot is lost"
        assert all(r.num_output for r in self.waiting_with_kv), "a waiting request holds blocks without KV"
        for queue in (self.running, self.waiting):
            assert [r.order for r in queue] == sorted(r.order for r in queue), "a queue is out of order"

"""Simulates how a replica that the autoscaler ends gives its requests to others. The schedulers decide which leave, and
this module gives the transfer of their KV a duration. Groups leave as in deployments/replicas/departure.py.

The replica that stops holds the KV until it has been read, however long that takes, or until the request moves again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cluster.lab.simulator.events import EventLoop
from cluster.lab.simulator.pool import Pool
from cluster.lab.simulator.replica import Replica
from cluster.lab.simulator.results import MoveUse, Results
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace
from deployments.replicas.departure import GROUP, MOST_GROUPS, ROUND_S
from engine.core.engine_stats import load_of
from engine.core.output import Event
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import Closed, HoldRequest, OpenHandoff, Received
from engine.wire.remote_request import KVSource, RemoteRequest


@dataclass(slots=True)
class _Departure:
    group: int  #: requests that leave at the same time
    until: int = 0  #: requests that are left once the group has gone
    rounds: int = 0


class MoveTraffic:
    """All requests that move between the replicas of a pool."""

    def __init__(
        self,
        spec: ClusterSpec,
        trace: Trace,
        loop: EventLoop,
        pool: Pool,
        results: Results,
        after: Callable[[Replica], None],
    ):
        """after: function called with each replica affected by an event."""
        self._spec, self._trace, self._loop, self._pool = spec, trace, loop, pool
        self._results, self._after = results, after
        self._departing: dict[Replica, _Departure] = {}
        self._held: dict[str, tuple[Replica, HoldRequest]] = {}  # KV that nobody has begun to read, by request
        self._link_free_at: defaultdict[Replica, float] = defaultdict(float)
        self._count = 0
        self._bytes = 0.0

    def depart(self, replica: Replica) -> None:
        """Move the requests of a replica that gets no new ones, a few at a time, as far as the others have room."""
        group = max(GROUP, len(replica.scheduler.queue.live) // MOST_GROUPS)
        self._departing[replica] = _Departure(group)
        self._next_group(replica)

    def act(self, replica: Replica) -> None:
        """Carry out what a replica's scheduler has decided about moves."""
        moved, replica.moved = replica.moved, []
        for event in moved:
            self._send_on(event)
        actions, replica.actions = replica.actions, []
        for action in actions:
            match action:
                case HoldRequest(asked):
                    self._held[asked.request_id] = replica, action
                case OpenHandoff(asked):
                    self._read(asked, replica)
        departure = self._departing.get(replica)
        if departure is not None and len(replica.scheduler.queue.live) <= departure.until:
            self._next_group(replica)

    def use(self) -> MoveUse:
        return MoveUse(count=self._count, gigabytes=self._bytes / 1e9)

    def _next_group(self, replica: Replica) -> None:
        departure, live = self._departing[replica], len(replica.scheduler.queue.live)
        if not live:
            del self._departing[replica]
            return
        count = min(departure.group, self._room(), live)
        departure.until, departure.rounds = live - count if count else 0, departure.rounds + 1
        self._loop.later(ROUND_S, self._next_round, replica, departure.rounds)
        if count:
            replica.move(count, self._loop.now)
            self._after(replica)

    def _next_round(self, replica: Replica, rounds: int) -> None:
        """Start the next group, unless it started earlier because the one before had left."""
        if replica in self._departing and self._departing[replica].rounds == rounds:
            self._next_group(replica)

    def _room(self) -> int:
        """Return how many sequences the other replicas could start now."""
        slots = self._spec.engine.max_num_seqs
        return sum(max(0, slots - load_of(replica.scheduler).sequences) for replica in self._pool.up.values())

    def _send_on(self, event: Event) -> None:
        """Send a request that has left its replica to another one."""
        request, self._count = event.request, self._count + 1
        if (unread := self._held.pop(request.request_id, None)) is not None:  # it moves again before its KV was read
            source, held = unread
            source.handle(Closed(held.remote_request.handoff_id, "expired"), self._loop.now)
            self._after(source)
        self._results.moved(request, self._spec.token_s)
        message = msgspec.structs.replace(
            self._trace.request(int(request.request_id)),
            prompt=list(request.tokens),
            num_prompt=request.num_prompt,
        ).asking(*event.delta.records(KVSource))
        self._loop.at(self._loop.now + self._spec.token_s + self._spec.call_s, self._add, message)

    def _add(self, message: GenerateRequest) -> None:
        replica = self._pool.choose(message.request_id, message.prompt)
        replica.add(message, self._loop.now)
        self._after(replica)

    def _read(self, asked: RemoteRequest, reader: Replica) -> None:
        """Read KV from the replica that holds it, after everything else that this replica sends."""
        source, held = self._held.pop(asked.request_id)
        tokens = len(asked.token_ids)
        num_bytes = self._spec.layers.handed_over(asked.skip, tokens, asked.skip, tokens) * self._spec.kv_bytes
        end = max(self._loop.now, self._link_free_at[source]) + num_bytes / self._spec.bytes_per_s
        self._link_free_at[source] = end
        self._bytes += num_bytes
        self._loop.at(end + self._spec.handoff_s, self._finish, asked.handoff_id, source, held, reader)

    def _finish(self, handoff_id: str, source: Replica, held: HoldRequest, reader: Replica) -> None:
        source.handle(Closed(handoff_id, "released"), self._loop.now)
        self._after(source)
        reader.handle(Received(handoff_id, held.first), self._loop.now)
        self._after(reader)

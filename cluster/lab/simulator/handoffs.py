"""Simulates the transfer of KV from prefill to decode replicas: the replicas' schedulers choose the actions, and this
module decides how long each takes.

In the simulation no message is lost and no engine dies. So leases and heartbeats (engine/kv_transfer/protocol/) are
left out, except for the time of their messages. As in reality, reading begins with the first chunk, while prefill
computes the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.lab.simulator.events import EventLoop
from cluster.lab.simulator.pool import Pool
from cluster.lab.simulator.replica import Replica
from cluster.lab.simulator.results import HandoffUse
from cluster.lab.simulator.spec import ClusterSpec
from engine.errors import ServingError
from engine.wire.handoff import Closed, Failed, FinishPrefill, OpenHandoff, Received, ReportProgress
from engine.wire.remote_request import RemoteRequest


@dataclass(slots=True)
class _Handoff:
    decode: Replica
    prefill: Replica
    skip: int  #: prompt tokens that decode has already
    end: int  #: all prompt tokens
    sent: int  #: prompt tokens of which all KV that may be read is in transfer or has arrived
    read_at: float = 0.0  #: time at which the last of them has arrived


class HandoffTraffic:
    """All handoffs between the two pools."""

    def __init__(self, spec: ClusterSpec, loop: EventLoop, prefill: Pool, after: Callable[[Replica], None]):
        """after: function called with each replica affected by an event."""
        self._spec, self._loop, self._pool, self._after = spec, loop, prefill, after
        self._live: dict[str, _Handoff] = {}
        self._link_free_at: dict[Replica, float] = {}
        self._count = 0
        self._bytes = self._link_s = 0.0

    def act(self, replica: Replica) -> None:
        """Carry out the handoff actions of a replica's scheduler."""
        now, actions = self._loop.now, replica.actions
        for action in actions:
            match action:
                case OpenHandoff(remote_request):
                    self._loop.at(now + self._spec.call_s, self._dispatch, remote_request, replica)
                case ReportProgress(handoff_id, upto):
                    self._send(self._live[handoff_id], upto)
                case FinishPrefill(handoff_id):
                    handoff = self._live[handoff_id]
                    self._loop.at(max(now, handoff.read_at) + self._spec.handoff_s, self._finish, handoff, action)
        actions.clear()

    def use(self, duration_s: float) -> HandoffUse:
        senders = max(1, len(self._link_free_at))
        link_busy = self._link_s / (senders * max(duration_s, 1e-9))
        return HandoffUse(count=self._count, gigabytes=self._bytes / 1e9, link_busy=link_busy)

    def _dispatch(self, remote_request: RemoteRequest, decode: Replica) -> None:
        handoff_id = remote_request.handoff_id
        prefill = self._pool.choose(handoff_id, remote_request.token_ids)
        # register it before the prefill engine gets it, which may start it and report on it at once
        self._live[handoff_id] = _Handoff(
            decode, prefill, remote_request.skip, len(remote_request.token_ids), remote_request.skip
        )
        try:
            prefill.add_remote_prefill(remote_request, self._loop.now)
        except ServingError as error:  # Overloaded: decode computes the prompt itself
            del self._live[handoff_id]
            self._pool.ended(handoff_id)
            failed = Failed(handoff_id, "remote_prefill_failed", remote_request.skip, False, str(error))
            decode.handle(failed, self._loop.now)
            self._after(decode)
            return
        self._count += 1
        self._after(prefill)

    def _send(self, handoff: _Handoff, upto: int) -> None:
        """Send the KV up to this token, after everything else that the replica is sending."""
        tokens = self._spec.layers.handed_over(handoff.sent, upto, handoff.skip, handoff.end)
        num_bytes = tokens * self._spec.kv_bytes
        seconds = num_bytes / self._spec.bytes_per_s
        handoff.sent = upto
        handoff.read_at = max(self._loop.now, self._link_free_at.get(handoff.prefill, 0.0)) + seconds
        self._link_free_at[handoff.prefill] = handoff.read_at
        self._bytes += num_bytes
        self._link_s += seconds

    def _finish(self, handoff: _Handoff, finish: FinishPrefill) -> None:
        del self._live[finish.handoff_id]
        self._pool.ended(finish.handoff_id)
        handoff.prefill.handle(Closed(finish.handoff_id, "released"), self._loop.now)
        self._after(handoff.prefill)
        handoff.decode.handle(Received(finish.handoff_id, finish.first), self._loop.now)
        self._after(handoff.decode)

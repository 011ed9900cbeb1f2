"""Sends the prefill requests of a decode engine to prefill replicas. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from deployments.routing.stats import RoutingStats
from engine.black_box import compute_key, found_keys, read_key
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.wire.messages import Command, EngineStatus
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.handoffs import PrefillReplica, PrefillReplicas, RemoteRequestFailed
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import PeerPool

logger = logging.getLogger(__name__)

# deploying: replicas of the newest configuration are still missing; up: a replica is running
PoolState = Literal["deploying", "up", "down"]

ABORT_S = 10.0  # for an ingress to abort a request with which another engine has ended
POLL_INTERVAL_S = 1.0  # between polls of the prefill engines' statuses


class RemotePool(Protocol):
    """Prefill or encode replicas of one model."""

    routing: RoutingStats  #: totals of the routing of prefill requests

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        """Make a replica compute the prompt. Returns when the handoff has ended there, for any reason.

        Cancelling the call cancels the request there. avoid: ids of engines that should not get the request if there
        are other engines. Raises ServingError.
        """

    async def statuses(self) -> Sequence[EngineStatus]:
        """Return one status per healthy replica."""

    async def state(self) -> PoolState:
        """Return the state of the replicas in Serve, which may be newer than `statuses`."""


class RemoteDispatcher:
    """Makes one call per prefill request. The call stays open until the handoff ends, so that a stopping replica waits
    for it."""

    def __init__(
        self,
        pool: RemotePool,
        send: Callable[[Command], None],
        kind: PeerPool = "prefill",
        ended: Callable[[str, EngineUnavailable], None] = lambda request_id, error: None,
    ):
        """send: function that sends a command to this replica's engine. kind: kind of the pool, which determines
        whether it computes prompts or images. ended: function called if an engine has ended by itself with a request
        of this replica's engine, with its id and the error."""
        self._ended = ended
        self.pool, self._kind = pool, kind
        self._send = send
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._avoid: list[str] = []
        self._alive: list[str] = []
        self._watching: asyncio.Task[None] | None = None

    def dispatch(self, remote_request: RemoteRequest) -> None:
        self._calls[remote_request.handoff_id] = asyncio.create_task(self._call(remote_request))

    def cancel(self, handoff_id: str) -> None:
        """End the call of a handoff, if it is still open."""
        if (call := self._calls.get(handoff_id)) is not None:
            call.cancel()

    def start(self, own: Callable[[], EngineStatus]) -> None:
        """Start to tell the engine periodically which prefill engines are up. own: function that returns the engine's
        newest status."""
        self._watching = asyncio.create_task(self._watch(own))

    def close(self) -> None:
        for task in (self._watching, *self._calls.values()):
            if task is not None:
                task.cancel()

    async def _call(self, remote_request: RemoteRequest) -> None:
        handoff_id = remote_request.handoff_id
        try:
            await self.pool.prefill(remote_request, self._avoid)
        except ServingError as error:
            logger.warning("prefill request failed handoff_id=%s request_id=%s attempt=%d: %s",
                           handoff_id, remote_request.request_id, remote_request.attempt, error)  # fmt: skip
            if isinstance(error, EngineUnavailable) and (doing := _with_request(error.doing, remote_request)):
                self._ended(remote_request.request_id, EngineUnavailable(str(error), doing))
                await asyncio.sleep(ABORT_S)  # else the request would end the next engine before it is aborted
            retry = error.retryable and not isinstance(error, Overloaded)  # Overloaded means that all replicas are full
            self._send(RemoteRequestFailed(handoff_id, str(error), retry))
        finally:
            del self._calls[handoff_id]

    async def _watch(self, own: Callable[[], EngineStatus]) -> None:
        while True:
            await self._poll(own)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _poll(self, own: Callable[[], EngineStatus]) -> None:
        try:
            status = own()
        except EngineUnavailable:
            return  # the engine takes no commands, and is about to be replaced
        found = await self.pool.statuses()
        fingerprint, handoffs = status.with_pool(self._kind)
        others = [e.engine_id for e in found if e.fingerprint != fingerprint or e.engine_id == status.engine_id]
        self._avoid = [*others, *(handoffs.quarantined if handoffs else [])]
        willing = [other for other in found if other.role in (None, self._kind)]
        fitting = [PrefillReplica.of(other) for other in willing if other.engine_id not in others]
        self._send(PrefillReplicas(fitting, self._kind))
        alive = sorted(replica.engine_id for replica in fitting)
        if alive != self._alive:
            what = "prompts are computed" if self._kind == "prefill" else "images are encoded"
            logger.info("%s engines: %s", self._kind, ", ".join(alive) or f"none; {what} here")
            self._alive = alive


def _with_request(doing: Sequence[str], remote_request: RemoteRequest) -> Sequence[str]:
    """Return what an engine was doing when it ended, with the request's own id if it computed its prompt; nothing if it
    did not work on it."""
    lora = remote_request.record(ModelAdapter)
    handoff, request = compute_key(remote_request.handoff_id), compute_key(remote_request.request_id)
    keys = [handoff] if lora is None else [handoff, read_key(lora.digest)]
    found = found_keys(doing, keys)
    return [*doing, request] if handoff in found else doing if found else []

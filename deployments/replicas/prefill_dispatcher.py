"""Where a decode engine's prefill requests go. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.wire.messages import Command, EngineStatus, PrefillReplica, PrefillReplicas, RemotePrefillFailed
from engine.wire.remote_prefill import RemotePrefillRequest

logger = logging.getLogger(__name__)

# deploying: replicas of the newest configuration are still to come; up: some replica runs
PoolState = Literal["deploying", "up", "down"]

POLL_INTERVAL_S = 1.0  # how often the prefill engines are asked how they are


class PrefillPool(Protocol):
    """The prefill replicas of one model.

    routing: how prefill requests found their replicas.
    """

    routing: RoutingStats

    async def prefill(self, prefill_request: RemotePrefillRequest, avoid: list[str]) -> None:
        """Returns when the handoff is over in the engine that took it, however it ended. Cancelling it drops the prefill request
        there. avoid: ids of engines that should not get it, if there are others. Raises ServingError."""

    async def statuses(self) -> Sequence[EngineStatus]:
        """One per healthy replica."""

    async def state(self) -> PoolState:
        """What Serve says of them, which may be ahead of `statuses`."""


class PrefillDispatcher:
    """One call per prefill request, open until its handoff is over: so a prefill replica that is to stop waits for it."""

    def __init__(self, pool: PrefillPool, send: Callable[[Command], None]):
        """send: to the decode engine."""
        self.pool = pool
        self._send = send
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._avoid: list[str] = []
        self._alive: list[str] = []
        self._watching: asyncio.Task[None] | None = None

    def dispatch(self, prefill_request: RemotePrefillRequest) -> None:
        self._calls[prefill_request.handoff_id] = asyncio.create_task(self._call(prefill_request))

    def cancel(self, handoff_id: str) -> None:
        """End the call, if it is still open."""
        if (call := self._calls.get(handoff_id)) is not None:
            call.cancel()

    def start(self, own: Callable[[], EngineStatus]) -> None:
        """Tell the engine from now on which prefill engines there are. own: its newest status."""
        self._watching = asyncio.create_task(self._watch(own))

    def close(self) -> None:
        """End all calls."""
        for task in (self._watching, *self._calls.values()):
            if task is not None:
                task.cancel()

    async def _call(self, prefill_request: RemotePrefillRequest) -> None:
        try:
            await self.pool.prefill(prefill_request, self._avoid)
        except ServingError as error:
            logger.warning("prefill request failed handoff_id=%s request_id=%s attempt=%d: %s",
                           prefill_request.handoff_id, prefill_request.request_id, prefill_request.attempt, error)  # fmt: skip
            retry = error.retryable and not isinstance(error, Overloaded)  # then all replicas are full
            self._send(RemotePrefillFailed(prefill_request.handoff_id, str(error), retry))
        finally:
            del self._calls[prefill_request.handoff_id]

    async def _watch(self, own: Callable[[], EngineStatus]) -> None:
        while True:
            await self._poll(own)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _poll(self, own: Callable[[], EngineStatus]) -> None:
        try:
            status = own()
        except EngineUnavailable:
            return  # it takes nothing in, and is about to be replaced
        found = await self.pool.statuses()
        others = [other.engine_id for other in found if other.fingerprint != status.fingerprint]
        self._avoid = [*others, *(status.handoffs.quarantined if status.handoffs else [])]
        fitting = [PrefillReplica.of(other) for other in found if other.engine_id not in others]
        self._send(PrefillReplicas(fitting))
        alive = sorted(replica.engine_id for replica in fitting)
        if alive != self._alive:
            logger.info("prefill engines: %s", ", ".join(alive) or "none; prompts are computed here")
            self._alive = alive

"""Moves the requests of a replica that is about to stop to other replicas. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import ReplicaStatus
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
ROUND_S = 0.5  # between two looks at the room elsewhere

Statuses = Callable[[], Awaitable[Sequence[EngineStatus]]]


async def depart(engine: EngineReplica, statuses: Statuses, slots: int) -> None:
    """Move the engine's requests to other replicas as far as these have room, until none is left.

    Without another replica that can go on with the requests, they continue here. statuses: function that returns the
    statuses of the pool's replicas. slots: sequences that one replica runs at a time.
    """
    began = engine.num_calls
    logger.info("replica departs requests=%d", began)
    while engine.num_calls:
        try:
            own = engine.status()
        except EngineUnavailable:
            return  # it is gone, and its requests are replayed
        try:
            others = await statuses()
        except Exception as error:  # noqa: BLE001 - of Serve or Ray; the next round may know more
            logger.warning("the other replicas cannot be asked: %r", error)
            others = []
        if room := room_elsewhere(own, others, slots):
            engine.move_requests(room)
        await asyncio.sleep(ROUND_S)
    logger.info("replica departed requests=%d", began)


def room_elsewhere(own: ReplicaStatus, others: Sequence[EngineStatus], slots: int) -> int:
    """Return how many requests the other replicas of the same model could start now."""
    loads = [
        status.stats.running + status.stats.waiting + status.stats.receiving
        for status in others
        if status.engine_id != own.engine_id and status.fingerprint and status.fingerprint == own.fingerprint
    ]
    return sum(max(0, slots - load) for load in loads)

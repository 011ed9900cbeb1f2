"""Moves requests of a replica that is out of KV blocks to replicas that have many free. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from deployments.replicas.departure import GROUP, Statuses, takes_requests_of
from deployments.replicas.engine_control import EngineControl
from engine.errors import EngineUnavailable
from engine.wire.stats.engine_stats import EngineStats

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # as often as engines report
IDLE_USAGE = 0.5  # highest share of KV blocks in use at which a replica counts as idle
FILLED_USAGE = 0.75  # highest share after requests have moved there, so that none soon moves back


async def rebalance(engine: EngineControl, statuses: Statuses, slots: int) -> None:
    """Until cancelled, let requests move from this replica whenever it has preempted requests and another replica is
    idle.

    statuses, slots: as for `depart`.
    """
    before = 0
    while True:
        await asyncio.sleep(PERIOD_S)
        try:
            own = engine.status()
            preempted, before = own.stats.preemptions - before, own.stats.preemptions
            if preempted <= 0:
                continue
            others = [status.stats for status in await statuses() if takes_requests_of(own, status)]
        except EngineUnavailable:
            continue
        except Exception as error:  # noqa: BLE001 - of Serve or Ray; the next round may know more
            logger.warning("the other replicas cannot be asked: %r", error)
            continue
        if count := requests_to_move(preempted, own.stats, others, slots):
            logger.info("replica is out of KV blocks preempted=%d moves=%d", preempted, count)
            engine.move_requests(count)


def requests_to_move(preempted: int, own: EngineStats, others: Sequence[EngineStats], slots: int) -> int:
    """Return how many requests should leave an engine: as many as it has just preempted, but at most GROUP, and no more
    than fit into the free blocks and slots of idle engines.

    others: engines that can take its requests. slots: sequences that one of them runs at a time.
    """
    share = own.kv_usage / max(1, own.running)
    rooms = [room(other, share, slots) for other in others]
    return max(0, min(preempted, GROUP, sum(rooms), own.running + own.waiting - 1))


def room(other: EngineStats, share: float, slots: int) -> int:
    """Return how many requests an engine can take; none unless it is idle. share: fraction of the blocks that one
    request uses."""
    if other.waiting or other.kv_usage > IDLE_USAGE:
        return 0
    free_slots = slots - other.running - other.receiving
    return max(0, min(free_slots, int((FILLED_USAGE - other.kv_usage) / share) if share else free_slots))

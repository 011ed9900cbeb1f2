"""Moves the requests of a replica that is about to stop to other replicas. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from deployments.replicas.engine_control import EngineControl
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
ROUND_S = 0.5  # longest wait for a group of requests to leave, and between two looks at the room elsewhere
LEFT_POLL_S = 0.02
GROUP = 4  # requests that leave at the same time: more would delay each other
MOST_GROUPS = 16  # so that a replica with many requests still ends in time

Statuses = Callable[[], Awaitable[Sequence[EngineStatus]]]


async def depart(
    engine: EngineControl, statuses: Statuses, slots: int, goes_on: Callable[[], bool] = lambda: True
) -> None:
    """Move the engine's requests to other replicas as far as these have room, a few at a time, until none is left.

    As long as there are replicas that can take over the KV, requests move to these. If there are only others of the
    same model, such as those of a version with other numerics, these compute the KV again from the tokens that are
    known. If no other replica can continue the requests, they continue here.

    statuses: function that returns the statuses of the pool's replicas. slots: sequences that one replica runs at a
    time. goes_on: function that returns whether the requests should still leave.
    """
    began = engine.num_answers
    group = max(GROUP, began // MOST_GROUPS)
    logger.info("requests are to leave requests=%d", began)
    while engine.num_answers and goes_on():
        try:
            own = engine.status()
        except EngineUnavailable:
            return  # it is gone, and its requests are replayed
        try:
            others = await statuses()
        except Exception as error:  # noqa: BLE001 - of Serve or Ray; the next round may know more
            logger.warning("the other replicas cannot be asked: %r", error)
            others = []
        calls = engine.num_answers
        count = min(group, room_in(takers(own, others), slots), calls)
        if count:
            engine.move_requests(count)
        await _until_left(engine, calls - count if count else 0)
    logger.info("requests have left requests=%d", began - engine.num_answers)


async def _until_left(engine: EngineControl, calls: int) -> None:
    """Wait until the engine has at most `calls` requests, but at most for ROUND_S."""
    deadline = asyncio.get_running_loop().time() + ROUND_S
    while engine.num_answers > calls and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(LEFT_POLL_S)


def takes_requests_of(own: EngineStatus, other: EngineStatus) -> bool:
    """Return whether requests can move from one engine to another, with their KV."""
    alike = bool(other.fingerprint) and other.fingerprint == own.fingerprint
    return alike and other.engine_id != own.engine_id and other.role != "prefill"


def takers(own: EngineStatus, others: Iterable[EngineStatus]) -> list[EngineStatus]:
    """Return the engines that can continue what an engine leaves: those that can take over its KV, or else those that
    have the same model, and compute the KV again."""
    found = list(others)
    alike = [other for other in found if takes_requests_of(own, other)]
    return alike or [other for other in found if takes_texts_of(own, other)]


def takes_texts_of(own: EngineStatus, other: EngineStatus) -> bool:
    """Return whether an engine of the same model can continue requests of another one from their tokens."""
    alike = bool(_model_in(own.fingerprint)) and _model_in(own.fingerprint) == _model_in(other.fingerprint)
    return alike and other.engine_id != own.engine_id and other.role != "prefill"


def _model_in(fingerprint: str) -> list[str]:
    """Return the parts of a fingerprint of KV that say which model it is."""
    return [part for part in fingerprint.split() if part.startswith(("weights=", "config="))]


def room_in(replicas: Iterable[EngineStatus], slots: int) -> int:
    """Return how many requests these replicas could start now."""
    loads = [status.stats.running + status.stats.waiting + status.stats.receiving for status in replicas]
    return sum(max(0, slots - load) for load in loads)

"""The replicas of one model, as an ingress sees them. Knows no Ray; serve_pool.py does."""

from __future__ import annotations

import asyncio
from typing import Protocol

from deployments.replicas.replica_status import ReplicaStatus
from engine.errors import EngineUnavailable
from engine.wire.messages import GenerateRequest


class EnginePool(Protocol):
    async def generate(self, request: GenerateRequest) -> None:
        """Returns when the request has ended in its engine. Cancelling it aborts the request there.

        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """

    async def statuses(self) -> list[ReplicaStatus]:
        """One per healthy replica. Raises EngineUnavailable if there is none."""

    async def asleep(self) -> bool:
        """Whether there is no replica because nobody needs one: the next request starts one."""

    async def prefill_statuses(self) -> list[ReplicaStatus]:
        """One per healthy replica of those that compute prompts for these; none where there are no such."""


async def all_statuses(pool: EnginePool) -> tuple[list[ReplicaStatus], list[ReplicaStatus]]:
    """Of all replicas that answer: those that decode, and those that compute prompts for them."""

    async def decode() -> list[ReplicaStatus]:
        try:
            return await pool.statuses()
        except EngineUnavailable:
            return []

    return await asyncio.gather(decode(), pool.prefill_statuses())

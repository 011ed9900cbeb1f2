"""The replicas of one model, as an ingress sees them. Knows no Ray; serve_pool.py does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus, GenerateRequest


class ReplicaStatus(EngineStatus, frozen=True, kw_only=True, tag=EngineStatus.__struct_config__.tag):
    """An engine's newest status, and what its replica knows beside it.

    The tag is that of an EngineStatus, so that each of the two can be read as the other.
    """

    prefill_routing: RoutingStats | None = None  #: of its prefill requests; None if it sends none

    @classmethod
    def of(cls, status: EngineStatus, prefill_routing: RoutingStats | None) -> ReplicaStatus:
        return cls(**msgspec.structs.asdict(status), prefill_routing=prefill_routing)


class EnginePool(Protocol):
    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        """Return when the requests have ended in their engine, which is the same for all. Cancelling the call aborts
        them there. avoid: ids of engines that should not get them if there are others.

        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """

    async def statuses(self) -> list[ReplicaStatus]:
        """Return one status per healthy replica. Raises EngineUnavailable if there is none."""

    async def asleep(self) -> bool:
        """Return whether there is no replica because nobody needs one: the next request starts one."""

    async def reset_prefix_cache(self) -> None:
        """Have all replicas forget their cached prefixes, in both pools. Raises EngineUnavailable if one is silent."""

    async def prefill_statuses(self) -> list[ReplicaStatus]:
        """Return one status per healthy replica that computes prompts for these; none without such replicas."""


async def all_statuses(pool: EnginePool) -> tuple[list[ReplicaStatus], list[ReplicaStatus]]:
    """Return the statuses of all decode replicas that answer, and of all prefill replicas."""

    async def decode() -> list[ReplicaStatus]:
        try:
            return await pool.statuses()
        except EngineUnavailable:
            return []

    return await asyncio.gather(decode(), pool.prefill_statuses())


class ModelReplicas(msgspec.Struct, frozen=True):
    """The replicas of one model: those that answer requests, and those that compute prompts for them."""

    model: str
    decode: list[ReplicaStatus]
    prefill: list[ReplicaStatus]
    asleep: bool

    @classmethod
    async def of(cls, model: str, pool: EnginePool) -> ModelReplicas:
        """Leave out replicas that do not answer."""
        decode, prefill = await all_statuses(pool)
        return cls(model, decode, prefill, not decode and await pool.asleep())

    @classmethod
    async def of_all(cls, pools: Mapping[str, EnginePool]) -> list[ModelReplicas]:
        """pools: by model name."""
        return await asyncio.gather(*(cls.of(name, pool) for name, pool in pools.items()))

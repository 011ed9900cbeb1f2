"""The replicas of one model, as an ingress sees them. Knows no Ray; serve_pool.py does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from deployments.routing.config import Role
from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus, GenerateRequest, PeerPool


class ReplicaStatus(EngineStatus, frozen=True, kw_only=True, tag=EngineStatus.__struct_config__.tag):
    """An engine's newest status, and what else its replica knows.

    The tag is that of an EngineStatus, so that each of the two can be read as the other.
    """

    #: of its prefill requests, by the pool that they go to
    routing: dict[PeerPool, RoutingStats] = msgspec.field(default_factory=dict)
    node: str = ""  #: Ray's id of its node; the first rank's, of a group over several

    @classmethod
    def of(cls, status: EngineStatus, routing: dict[PeerPool, RoutingStats], node: str = "") -> ReplicaStatus:
        return cls(**msgspec.structs.asdict(status), routing=routing, node=node)


class EnginePool(Protocol):
    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        """Return when the requests have ended in their engine, which is the same for all. Cancelling the call aborts
        them there. avoid: ids of engines that should not get them if there are others.

        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """

    async def statuses(self) -> list[ReplicaStatus]:
        """Return one status per healthy replica. Raises EngineUnavailable if there is none."""

    async def asleep(self) -> bool:
        """Return whether there is no replica because none is needed: the next request starts one."""

    async def reset_prefix_cache(self) -> None:
        """Have all replicas forget their cached prefixes, in all pools. Raises EngineUnavailable if one is silent."""

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        """Return one status per healthy replica that computes prompts or images for these, by pool."""


class ModelReplicas(msgspec.Struct, frozen=True):
    """The replicas of one model: those that answer requests, and those that compute prompts or images for them."""

    model: str
    decode: list[ReplicaStatus]
    prefill: list[ReplicaStatus]
    encode: list[ReplicaStatus]
    asleep: bool

    @classmethod
    async def of(cls, model: str, pool: EnginePool) -> ModelReplicas:
        """Leave out replicas that do not answer."""

        async def statuses() -> list[ReplicaStatus]:
            try:
                return await pool.statuses()
            except EngineUnavailable:
                return []

        decode, peers = await asyncio.gather(statuses(), pool.peer_statuses())
        asleep = not decode and await pool.asleep()
        return cls(model, decode, peers.get("prefill", []), peers.get("encode", []), asleep)

    def on(self, node: str) -> ModelReplicas:
        """Return those of one node."""
        decode, prefill, encode = (
            [status for status in pool if status.node == node] for pool in (self.decode, self.prefill, self.encode)
        )
        return ModelReplicas(self.model, decode, prefill, encode, self.asleep)

    @property
    def by_role(self) -> dict[Role, list[ReplicaStatus]]:
        """The replicas of each role, in the order in which they work for a request."""
        return {"encode": self.encode, "prefill": self.prefill, "decode": self.decode}

    @classmethod
    async def of_all(cls, pools: Mapping[str, EnginePool]) -> list[ModelReplicas]:
        """pools: by model name."""
        return await asyncio.gather(*(cls.of(name, pool) for name, pool in pools.items()))

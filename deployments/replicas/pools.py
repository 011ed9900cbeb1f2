"""Pools of replicas of one model, as an ingress sees them. Independent of Ray; serve_pool.py is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from deployments.routing.choice_observer import ChoiceObserver
from deployments.routing.config import Role
from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Command, EngineStatus, Question
from engine.wire.stats.handoff_stats import PeerPool

A = TypeVar("A")


class ReplicaStatus(EngineStatus, frozen=True, kw_only=True, tag=EngineStatus.__struct_config__.tag):
    """An engine's newest status, with fields added by its replica.

    Its tag is that of EngineStatus, so that each of the two can be decoded as the other.
    """

    #: routing of its prefill requests, by the pool to which they go
    routing: dict[PeerPool, RoutingStats] = msgspec.field(default_factory=dict)
    node: str = ""  #: Ray's id of its node; of the first rank's node if it spans several

    @classmethod
    def of(cls, status: EngineStatus, routing: dict[PeerPool, RoutingStats], node: str = "") -> ReplicaStatus:
        return cls(**msgspec.structs.asdict(status), routing=routing, node=node)


class ReplicaQuestion(msgspec.Struct, frozen=True):
    """What the parts of a replica are asked, and not its engines."""


class EngineClient(Protocol):
    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        """Run requests in one engine, and return when all have ended there. Cancelling the call aborts them.

        avoid: ids of engines that should not get the requests if there are other engines.
        Waits for a replica if there is none. Raises ServingError; EngineUnavailable if the replica is lost meanwhile.
        """


class RoutedPool(Protocol):
    """A pool to which a router of this process sends."""

    observer: ChoiceObserver
    """Hears of the router's choices."""


class EnginePool(EngineClient, RoutedPool, Protocol):
    async def statuses(self) -> list[ReplicaStatus]:
        """Return one status per healthy replica. Raises EngineUnavailable if there is none."""

    async def asleep(self) -> bool:
        """Return whether there are no replicas because none is needed; the next request starts one."""

    async def ask_one(self, question: Question, kind: type[A], adapter: str = "") -> list[A]:
        """Ask all engines of one replica. kind: of the answers. adapter: digest of the adapter for whose requests the
        router would choose the replica. Raises ServingError if no replica answers."""

    async def tell(self, command: Command, peers: bool = False) -> None:
        """Send a command to all engines. peers: whether those that compute for the pool get it too. Raises
        EngineUnavailable if a replica does not answer."""

    async def ask(self, question: Question | ReplicaQuestion, kind: type[A], timeout_s: float) -> list[A]:
        """Ask the engines, or the parts, of the replicas in all pools, and return the answers of those that answer.
        kind: of the answers."""

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        """Return one status per healthy replica that computes prompts or images for this pool, by pool of the
        replica."""


class ModelReplicas(msgspec.Struct, frozen=True):
    """Replicas of one model: those that answer requests, and those that compute prompts or images for them."""

    model: str
    decode: list[ReplicaStatus]
    prefill: list[ReplicaStatus]
    encode: list[ReplicaStatus]
    asleep: bool

    @classmethod
    async def of(cls, model: str, pool: EnginePool) -> ModelReplicas:
        """Return the replicas of a pool that answer."""

        async def statuses() -> list[ReplicaStatus]:
            try:
                return await pool.statuses()
            except EngineUnavailable:
                return []

        found, peers = await asyncio.gather(statuses(), pool.peer_statuses())
        asleep = not found and await pool.asleep()
        decode = [status for status in found if status.role != "prefill"]
        prefill = [*peers.get("prefill", []), *(status for status in found if status.role == "prefill")]
        return cls(model, decode, prefill, peers.get("encode", []), asleep)

    def on(self, node: str) -> ModelReplicas:
        decode, prefill, encode = (
            [status for status in pool if status.node == node] for pool in (self.decode, self.prefill, self.encode)
        )
        return ModelReplicas(self.model, decode, prefill, encode, self.asleep)

    @property
    def by_role(self) -> dict[Role, list[ReplicaStatus]]:
        """Replicas by role, in the order in which they work on a request."""
        return {"encode": self.encode, "prefill": self.prefill, "decode": self.decode}

    @property
    def all(self) -> list[ReplicaStatus]:
        return [*self.encode, *self.prefill, *self.decode]

    @property
    def answering(self) -> list[ReplicaStatus]:
        """Replicas that answer requests, and those whose role can change, because these may have answered some."""
        return [*self.decode, *(status for status in self.prefill if status.role is not None)]

    @classmethod
    async def of_all(cls, pools: Mapping[str, EnginePool]) -> list[ModelReplicas]:
        """Return the replicas of all pools. pools: by model name."""
        return await asyncio.gather(*(cls.of(name, pool) for name, pool in pools.items()))

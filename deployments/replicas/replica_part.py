"""The end of a feature in a replica. Independent of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deployments.replicas.departure import Statuses
from deployments.replicas.engine_control import EngineControl
from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.wire.generate_request import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """What a replica's parts are made of."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherReplicas:
    """The replicas to which what an engine has can move."""

    statuses: Statuses
    send: Callable[..., Awaitable[None]]
    """Sends a request to one of them, and returns when the request has ended; `avoid` are ids of engines that should
    not get it."""
    model: ModelIdentity
    """Of the engine."""
    host: str
    """Address of this machine at which engines reach it."""
    key: ClusterKey | None


class ReplicaPart:
    """All methods do nothing by default, so that a part overrides what it needs."""

    async def leave(self, engine: EngineControl, others: OtherReplicas) -> None:
        """Move what an engine keeps besides requests, because its replica is about to stop or to restart."""

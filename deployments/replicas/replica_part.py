"""The end of a feature in a replica. Independent of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.replicas.departure import Statuses
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaQuestion, RoutedPool
from deployments.replicas.replica_engines import ReplicaEngines
from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.wire.generate_request import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetup:
    """What a replica's parts are made of."""

    config: EngineConfig
    engines: ReplicaEngines[Any]
    pools: Sequence[RoutedPool]
    """The pools that compute for this replica."""


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

    async def answer(self, question: ReplicaQuestion) -> Any:
        """Return the answer to a question, for msgpack; None if it is not for this part, or has no answer."""
        return None

    async def ended(self, reason: str) -> None:
        """The engines have ended or hang, and the replica is about to exit."""

    def stopped(self) -> None:
        """The engines end as they should."""

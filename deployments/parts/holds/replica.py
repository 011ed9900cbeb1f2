"""The holds of clients in a replica."""

from __future__ import annotations

from deployments.parts.holds.hold_moves import move_holds
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.replica_part import OtherReplicas, ReplicaPart, ReplicaSetup


def make(setup: ReplicaSetup) -> ReplicaPart:
    return ReplicaHolds()


class ReplicaHolds(ReplicaPart):
    async def leave(self, engine: EngineControl, others: OtherReplicas) -> None:
        await move_holds(engine, others)

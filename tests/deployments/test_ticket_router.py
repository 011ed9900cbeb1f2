from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from deployments.ticket_router import TicketRouter

POOL = DeploymentID("prefill-m", "manta")


def chosen(replicas: list[str], avoid: list[str]) -> set[str]:
    """Of many tries."""

    async def choose() -> list[str]:
        metadata = RequestMetadata("request", "internal")
        request = PendingRequest(args=[b"ticket", avoid], kwargs={}, metadata=metadata)
        candidates: list[Any] = [SimpleNamespace(replica_id=ReplicaID(name, POOL)) for name in replicas]
        (group,) = await TicketRouter.choose_replicas(None, candidates, request)  # type: ignore[arg-type]
        assert request.routing_context.should_backoff, "a full pool would be asked without a pause"
        return [replica.replica_id.unique_id for replica in group]

    return {name for _ in range(50) for name in asyncio.run(choose())}


def test_ticket_goes_to_any_replica_but_those_to_avoid():
    assert chosen(["a1", "b2", "c3"], avoid=[]) == {"a1", "b2", "c3"}
    assert chosen(["a1", "b2", "c3"], avoid=["prefill-m-b2"]) == {"a1", "c3"}


def test_ticket_goes_to_a_replica_to_avoid_where_there_is_no_other():
    assert chosen(["a1"], avoid=["prefill-m-a1"]) == {"a1"}

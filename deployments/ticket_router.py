"""Which prefill replica gets a ticket. Runs wherever there is a handle to them: in every decode replica."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class TicketRouter(RequestRouter):
    """The less busy of two, as Serve's own router takes, but none that the ticket is to avoid while there are others:
    the link to such a one has just failed, or it runs another model."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = candidate_replicas
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or a full pool would be asked without a pause
            _, avoid = pending_request.args  # of Prefill.prefill
            candidates = [r for r in candidates if not _is_among(r, avoid)] or candidates
        return [random.sample(candidates, min(2, len(candidates)))]


def _is_among(replica: RunningReplica, engine_ids: list[str]) -> bool:
    return any(engine_id.endswith(replica.replica_id.unique_id) for engine_id in engine_ids)

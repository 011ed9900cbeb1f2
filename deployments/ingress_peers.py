"""All ingresses of the application, as one of them sees them."""

from __future__ import annotations

import logging

import msgspec
from ray import serve

from deployments import ray_compat
from deployments.ingress_stats import IngressStats

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 3.0


async def stats_of_all_ingresses() -> list[IngressStats]:
    """Of those that answer in time. To be called in an ingress replica."""
    handle = serve.get_deployment_handle(ray_compat.INGRESS, serve.get_replica_context().app_name)
    answers = await ray_compat.broadcast(handle, "stats", STATS_TIMEOUT_S)
    if not any(isinstance(answer, bytes) for answer in answers):
        logger.warning("no ingress said within %.0f s what it counts", STATS_TIMEOUT_S)
    return [msgspec.msgpack.decode(answer, type=IngressStats) for answer in answers if isinstance(answer, bytes)]

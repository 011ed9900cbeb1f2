"""All ingresses of the application, as one of them sees them."""

from __future__ import annotations

import logging

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import ray_compat
from deployments.ingress_stats import IngressStats

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 3.0


async def stats_of_all_ingresses() -> list[IngressStats]:
    """Of those that answer in time. To be called in an ingress replica."""
    handle = serve.get_deployment_handle(ray_compat.INGRESS, serve.get_replica_context().app_name)
    answers = handle.broadcast("stats").results_async(timeout_s=STATS_TIMEOUT_S, return_exceptions=True)
    try:
        return [msgspec.msgpack.decode(a, type=IngressStats) for a in await answers if isinstance(a, bytes)]
    except (TimeoutError, RayError, DeploymentUnavailableError) as error:
        logger.warning("other ingresses did not say what they count: %s", error)
        return []

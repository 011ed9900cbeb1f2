"""All ingresses of the application, as one of them sees them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from ray import serve

from deployments import ray_compat
from deployments.observability.stats import IngressStats
from deployments.observability.timeline import SequenceTimeline

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0


class IngressPeers:
    """To be used in an ingress replica. Those that do not answer in time are left out."""

    async def stats(self) -> list[IngressStats]:
        return [msgspec.msgpack.decode(answer, type=IngressStats) for answer in await self._ask("stats")]

    async def timelines(self, name: str) -> list[SequenceTimeline]:
        answers = await self._ask("timelines", name)
        return [
            timeline for answer in answers for timeline in msgspec.msgpack.decode(answer, type=list[SequenceTimeline])
        ]

    async def _ask(self, method: str, *args: Any) -> list[bytes]:
        handle = serve.get_deployment_handle(ray_compat.INGRESS, serve.get_replica_context().app_name)
        answers = await ray_compat.broadcast(handle, method, TIMEOUT_S, *args)
        found = [answer for answer in answers if isinstance(answer, bytes)]
        if not found:
            logger.warning("no ingress answered within %.0f s when asked for its %s", TIMEOUT_S, method)
        return found

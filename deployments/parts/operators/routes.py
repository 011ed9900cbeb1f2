"""Routes for operators: health, metrics, load, and the timelines of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request, Response

from deployments.edge_part import EdgePart
from deployments.http.context import is_admin, key_name
from deployments.http.debug import LiveHandoffs, ServerLoad, Version, live_handoffs
from deployments.http.json_body import json_response
from deployments.http.route import ADMIN, KEY, OPEN, OWNER, Route
from deployments.http.server_header import NODE_HEADER
from deployments.observability.engine_metrics import PartMetrics
from deployments.observability.prometheus import CONTENT_TYPE, Metrics
from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import RequestTimeline
from deployments.openai.served.served_models import ServedModels
from engine.wire.messages import ResetPrefixCache

COUNTS = "counts by model, adapter and route; by API key to admins only"
PROGRESS = "whether the engines make progress"


class OperatorRoutes(EdgePart):
    def __init__(self, models: ServedModels, telemetry: Telemetry, metrics: Sequence[PartMetrics]):
        """metrics: of parts."""
        self._models, self._telemetry = models, telemetry
        self._metrics = Metrics(models.pools(), telemetry, metrics)

    def routes(self) -> list[Route]:
        healthy = "200 if every model has an engine that makes progress."
        forget = "Empty the prefix caches of all engines."
        of_node = "Prometheus metrics of the node whose proxy was asked."
        explained = "The timeline of a request; never its text."
        return [
            Route(OPEN, "GET", "/health", self.health, healthy, of_others=PROGRESS),
            Route(KEY, "GET", "/ping", self.health, "The same as /health.", of_others=PROGRESS),
            Route(KEY, "POST", "/ping", self.health, of_others=PROGRESS),
            Route(KEY, "GET", "/version", self.version, "The version of this server.", result=Version),
            Route(
                KEY,
                "GET",
                "/load",
                self.load,
                "Number of sequences waiting or running in this ingress.",
                result=ServerLoad,
                of_others="number of sequences in this ingress",
            ),
            Route(
                ADMIN,
                "POST",
                "/reset_prefix_cache",
                self.reset_prefix_cache,
                forget,
                of_others="ends the holds of all keys",
            ),
            Route(KEY, "GET", "/metrics", self.metrics, "Prometheus metrics.", result="text/plain", of_others=COUNTS),
            Route(KEY, "GET", "/metrics/node", self.node_metrics, of_node, result="text/plain", of_others=COUNTS),
            Route(
                ADMIN,
                "GET",
                "/debug/handoffs",
                self.handoffs,
                "KV in transfer between engines.",
                result=LiveHandoffs,
                of_others="ids of requests that have KV under way",
            ),
            Route(
                OWNER,
                "GET",
                "/debug/requests/{name:path}",
                self.explain,
                explained,
                result=RequestTimeline,
                of_others="the same of every request, to admins only",
            ),
        ]

    async def version(self) -> Response:
        return json_response(Version())

    async def load(self) -> Response:
        admissions = [model.admission for model in self._models.values()]
        return json_response(ServerLoad(sum(a.num_waiting + a.num_running for a in admissions)))

    async def health(self) -> Response:
        """Return 200 if every model has a replica that makes progress, or is scaled to zero."""
        await asyncio.gather(*(model.check_health() for model in self._models.values()))
        return Response()

    async def reset_prefix_cache(self) -> Response:
        await asyncio.gather(*(pool.tell(ResetPrefixCache(), peers=True) for pool in self._models.pools().values()))
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.text(by_key=is_admin(request)), media_type=CONTENT_TYPE)

    async def node_metrics(self, request: Request) -> Response:
        """Return the metrics of one node. Behind a proxy, this is the proxy's node, which the proxy names in a header;
        otherwise it is the ingress's node."""
        node = request.headers.get(NODE_HEADER, self._telemetry.stats.node)
        return Response(await self._metrics.text(node, by_key=is_admin(request)), media_type=CONTENT_TYPE)

    async def handoffs(self) -> Response:
        return json_response(await live_handoffs(self._models.pools()))

    async def explain(self, request: Request, name: str) -> Response:
        """Return the timeline of a request of the caller's API key, or, to an admin, of any request."""
        key = None if is_admin(request) else key_name(request)
        return json_response(await self._telemetry.explain(name, key))

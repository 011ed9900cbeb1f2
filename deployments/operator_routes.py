"""Routes for operators: health, metrics, load, and the timelines of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request, Response

from deployments.http.context import check_admin
from deployments.http.debug import LiveHandoffs, ServerLoad, Version, live_handoffs
from deployments.http.json_body import json_response
from deployments.http.route import Route
from deployments.http.server_header import NODE_HEADER
from deployments.observability.cluster_tapes import cluster_tapes
from deployments.observability.prometheus import CONTENT_TYPE, render_metrics
from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import RequestTimeline
from deployments.openai.served_models import ServedModels


class OperatorRoutes:
    def __init__(self, models: ServedModels, telemetry: Telemetry, admin_keys: Sequence[str] = ()):
        """admin_keys: names of the API keys that may fetch the tape; empty for all keys."""
        self._models, self._telemetry, self._admin_keys = models, telemetry, admin_keys

    def routes(self) -> list[Route]:
        healthy = "200 if every model has an engine that makes progress."
        forget = "Empty the prefix caches of all engines."
        of_node = "Prometheus metrics of the node whose proxy was asked."
        taped = "What the schedulers and routers have decided, for `manta replay`; no text."
        explained = "The timeline of a request; never its text."
        return [
            Route("GET", "/health", self.health, healthy),
            Route("GET", "/ping", self.health, "The same as /health."),
            Route("POST", "/ping", self.health),
            Route("GET", "/version", self.version, "The version of this server.", result=Version),
            Route(
                "GET", "/load", self.load, "Number of sequences waiting or running in this ingress.", result=ServerLoad
            ),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, forget),
            Route("GET", "/metrics", self.metrics, "Prometheus metrics.", result="text/plain"),
            Route("GET", "/metrics/node", self.node_metrics, of_node, result="text/plain"),
            Route("GET", "/debug/handoffs", self.handoffs, "KV in transfer between engines.", result=LiveHandoffs),
            Route("GET", "/debug/tape", self.tape, taped, result="application/octet-stream"),
            Route("GET", "/debug/requests/{name:path}", self.explain, explained, result=RequestTimeline),
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
        await asyncio.gather(*(pool.reset_prefix_cache() for pool in self._models.pools().values()))
        return Response()

    async def metrics(self) -> Response:
        return Response(await render_metrics(self._models.pools(), self._telemetry), media_type=CONTENT_TYPE)

    async def node_metrics(self, request: Request) -> Response:
        """Return the metrics of one node. Behind a proxy, this is the proxy's node, which the proxy names in a header;
        otherwise it is the ingress's node."""
        node = request.headers.get(NODE_HEADER, self._telemetry.stats.node)
        return Response(await render_metrics(self._models.pools(), self._telemetry, node), media_type=CONTENT_TYPE)

    async def handoffs(self) -> Response:
        return json_response(await live_handoffs(self._models.pools()))

    async def tape(self, request: Request) -> Response:
        """Return the tapes of all engines and routers, as a file of tapes."""
        check_admin(request, self._admin_keys, "fetch the tape")
        data = await cluster_tapes(self._models.pools().values(), self._telemetry)
        return Response(data, media_type="application/octet-stream")

    async def explain(self, name: str) -> Response:
        return json_response(await self._telemetry.explain(name))

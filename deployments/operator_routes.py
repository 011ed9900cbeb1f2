"""The routes for operators: health, metrics, load, and what happened to a request."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from deployments.http.debug import ServerLoad, Version, live_handoffs
from deployments.http.json_body import json_response
from deployments.observability.prometheus import CONTENT_TYPE, render_metrics
from deployments.observability.telemetry import Telemetry
from deployments.openai.served_models import ServedModels


def add_operator_routes(app: FastAPI, models: ServedModels, telemetry: Telemetry) -> None:
    @app.get("/version")
    async def version() -> Response:
        return json_response(Version())

    @app.get("/load")
    async def load() -> Response:
        admissions = [model.admission for model in models.values()]
        return json_response(ServerLoad(sum(a.num_waiting + a.num_running for a in admissions)))

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def health() -> Response:
        """200 if every model has a replica that makes progress, or is scaled to zero."""
        await asyncio.gather(*(model.check_health() for model in models.values()))
        return Response()

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await asyncio.gather(*(pool.reset_prefix_cache() for pool in models.pools().values()))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await render_metrics(models.pools(), telemetry), media_type=CONTENT_TYPE)

    @app.get("/debug/handoffs")
    async def handoffs() -> Response:
        return json_response(await live_handoffs(models.pools()))

    @app.get("/debug/requests/{name:path}")
    async def explain(name: str) -> Response:
        return json_response(await telemetry.explain(name))

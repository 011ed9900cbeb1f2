"""The routes of embeddings, scores and rankings."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from deployments.http.context import RequestContext
from deployments.http.json_body import json_response, read_body, with_warning
from deployments.http.streaming import run_while_connected
from deployments.http.validation import UnknownFields
from deployments.openai.served_models import ServedModels
from deployments.pooling.pooled_model import PooledModel
from deployments.pooling.request_bodies import EmbeddingBody, RerankBody, ScoreBody


def add_pooling_routes(app: FastAPI, models: ServedModels, unknown_fields: UnknownFields) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingBody, unknown_fields)
        work = PooledModel(models.find(body.model)).embed(body, RequestContext.of(request, body, "embd"))
        return with_warning(body, json_response(await run_while_connected(request, work)))

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody, unknown_fields)
        work = PooledModel(models.find(body.model)).score(body, RequestContext.of(request, body, "score"))
        return with_warning(body, json_response(await run_while_connected(request, work)))

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankBody, unknown_fields)
        work = PooledModel(models.find(body.model)).rerank(body, RequestContext.of(request, body, "rerank"))
        return with_warning(body, json_response(await run_while_connected(request, work)))

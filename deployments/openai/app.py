"""The HTTP routes. Knows no Ray: an ingress gives it the models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from deployments.metrics import CONTENT_TYPE, render_metrics
from deployments.openai.answers import ModelCard, ModelList
from deployments.openai.error_body import error_response
from deployments.openai.header import Header
from deployments.openai.protocol import ChatBody, CompletionBody, parse
from deployments.openai.served_model import ServedModel
from deployments.openai.sse import stream
from deployments.token_channel import TokenChannel
from engine.errors import InvalidParameter, ModelNotFound, ServingError

MAX_REQUEST_ID = 128


def openai_app(models: Mapping[str, ServedModel], channel: TokenChannel) -> FastAPI:
    """models: by the names they are served under; the first answers requests that name none."""
    app = FastAPI(title="Manta", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await request.body())
        model = find(body.model)
        answer = await model.chat(body, header(request, "chatcmpl", model))
        return await stream(answer.chunks()) if body.stream else _json(await answer.whole())

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        body = parse(CompletionBody, await request.body())
        model = find(body.model)
        answer = await model.completion(body, header(request, "cmpl", model))
        return await stream(answer.chunks()) if body.stream else _json(await answer.whole())

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList([card(model) for model in models.values()]))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return _json(card(find(name)))

    @app.get("/health")
    async def health() -> Response:
        """200 if every model has a replica that makes progress."""
        await asyncio.gather(*(model.pool.statuses() for model in models.values()))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        pools = {name: model.pool for name, model in models.items()}
        return Response(await render_metrics(pools, channel), media_type=CONTENT_TYPE)

    @app.exception_handler(ServingError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    def find(name: str | None) -> ServedModel:
        if name is None:
            return next(iter(models.values()))
        if name not in models:
            raise ModelNotFound(name, list(models))
        return models[name]

    def header(request: Request, prefix: str, model: ServedModel) -> Header:
        given = request.headers.get("x-request-id", "")
        if len(given) > MAX_REQUEST_ID:
            raise InvalidParameter("X-Request-Id", given, f"at most {MAX_REQUEST_ID} characters")
        return Header(f"{prefix}-{given or uuid.uuid4().hex}", int(time.time()), model.info.name)

    def card(model: ServedModel) -> ModelCard:
        return ModelCard(model.info.name, started, model.info.root, model.info.max_model_len)

    return app


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

"""The HTTP routes. They know nothing of Ray: an ingress passes in the models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from deployments.frontend.api_keys import ApiKeys
from deployments.observability.prometheus import CONTENT_TYPE, render_metrics
from deployments.observability.telemetry import MetricsMiddleware, Telemetry
from deployments.openai.chat import ChatResponse
from deployments.openai.completion import CompletionResponse
from deployments.openai.context import RequestContext
from deployments.openai.debug import VERSION, ServerLoad, Version, live_handoffs
from deployments.openai.errors import error_response
from deployments.openai.middleware import AuthConfig, AuthMiddleware
from deployments.openai.openapi import openapi_document
from deployments.openai.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    RequestBody,
    TokenizeBody,
    parse,
)
from deployments.openai.responses import ModelCard, ModelList
from deployments.openai.served_model import ServedModel
from deployments.openai.streaming import run_while_connected, stream
from deployments.openai.validation import check_json_size, warning
from deployments.replicas.pools import EnginePool
from engine.errors import ModelNotFound, RequestError, ServingError, UnsupportedMediaType


def openai_app(
    models: Mapping[str, ServedModel],
    telemetry: Telemetry,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
) -> FastAPI:
    """Build the application. Raises ConfigError for a bad file of API keys.

    models: by the names they are served under; if there is only one, it also answers requests that name none.
    """
    app = FastAPI(title="Manta", docs_url=None, redoc_url=None, redirect_slashes=False)
    api_keys = None if auth.api_keys_file is None else ApiKeys(Path(auth.api_keys_file))
    document = openapi_document(VERSION, with_keys=auth.api_keys_file is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]  # the way FastAPI's manual gives
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await read_json(request), auth.unknown_fields)
        response = await find(body.model).chat(body, RequestContext.of(request, body, "chatcmpl"))
        return await _respond(request, body, response)

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        body = parse(CompletionBody, await read_json(request), auth.unknown_fields)
        response = await find(body.model).completion(body, RequestContext.of(request, body, "cmpl"))
        return await _respond(request, body, response)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await read_json(request), auth.unknown_fields)
        return _with_warning(body, _json_response(await find(body.model).tokenize(body)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await read_json(request), auth.unknown_fields)
        return _with_warning(body, _json_response(await find(body.model).detokenize(body)))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json_response(ModelList([card(model) for model in models.values()]))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if not name:
            return await list_models()
        return _json_response(card(find(name)))

    @app.get("/version")
    async def version() -> Response:
        return _json_response(Version())

    @app.get("/load")
    async def load() -> Response:
        admissions = [model.admission for model in models.values()]
        return _json_response(ServerLoad(sum(a.num_waiting + a.num_running for a in admissions)))

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def health() -> Response:
        """200 if every model has a replica that makes progress, or is scaled to zero."""
        await asyncio.gather(*(model.check_health() for model in models.values()))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await render_metrics(pools(), telemetry), media_type=CONTENT_TYPE)

    @app.get("/debug/handoffs")
    async def handoffs() -> Response:
        return _json_response(await live_handoffs(pools()))

    @app.get("/debug/requests/{name:path}")
    async def explain(name: str) -> Response:
        return _json_response(await telemetry.explain(name))

    @app.exception_handler(ServingError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    app.add_middleware(AuthMiddleware, api_keys=api_keys, config=auth)
    if auth.cors_origins:  # outside of the check of keys: a browser's first question has none
        app.add_middleware(CORSMiddleware, allow_origins=auth.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(MetricsMiddleware, telemetry=telemetry)  # the last one is the outermost: it sees every response

    def pools() -> dict[str, EnginePool]:
        return {name: model.pool for name, model in models.items()}

    def find(name: str | None) -> ServedModel:
        if not name:
            if len(models) > 1:
                raise RequestError(f"model is required; served here: {', '.join(models)}", "model")
            return next(iter(models.values()))
        if name not in models:
            raise ModelNotFound(name, list(models))
        return models[name]

    def card(model: ServedModel) -> ModelCard:
        return ModelCard(model.info.name, started, model.info.root, model.info.max_model_len)

    return app


async def read_json(request: Request) -> bytes:
    """Return the body. Raises UnsupportedMediaType, BodyTooLarge as it is read, RequestError for too many values."""
    content_type = request.headers.get("content-type")
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaType(content_type)
    body = await request.body()
    await check_json_size(body)
    return body


async def _respond(request: Request, body: GenerationBody, response: ChatResponse | CompletionResponse) -> Response:
    if body.stream:
        return _with_warning(body, await run_while_connected(request, stream(response.chunks())))
    return _with_warning(body, _json_response(await run_while_connected(request, response.full())))


def _with_warning(body: RequestBody, response: Response) -> Response:
    """Name the fields of the request that had no effect."""
    if body.ignored:
        response.headers["Warning"] = warning(body.ignored)
    return response


def _json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

"""The HTTP routes. Knows no Ray: an ingress gives it the models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deployments.frontend.api_keys import ApiKeys
from deployments.observability.prometheus import CONTENT_TYPE, render_metrics
from deployments.observability.telemetry import MetricsMiddleware, Telemetry
from deployments.openai.chat import ChatAnswer
from deployments.openai.completion import CompletionAnswer
from deployments.openai.connection import while_connected
from deployments.openai.context import RequestContext
from deployments.openai.debug import request_timeline
from deployments.openai.errors import error_response
from deployments.openai.live_handoffs import live_handoffs
from deployments.openai.middleware import AuthConfig, AuthMiddleware
from deployments.openai.openapi import openapi_document
from deployments.openai.requests import ChatBody, CompletionBody, GenerationBody, parse
from deployments.openai.response_meta import ResponseMeta
from deployments.openai.responses import ModelCard, ModelList
from deployments.openai.served_model import ServedModel
from deployments.openai.status import VERSION, Load, Version
from deployments.openai.streaming import stream
from deployments.openai.tokenize import DetokenizeBody, TokenizeBody
from engine.errors import InvalidParameter, ModelNotFound, RequestError, ServingError, UnsupportedMediaType

MAX_REQUEST_ID = 128


def openai_app(
    models: Mapping[str, ServedModel],
    telemetry: Telemetry,
    gate: AuthConfig = AuthConfig(),  # noqa: B008  frozen
) -> FastAPI:
    """models: by the names they are served under; if there is only one, it also answers requests that name none.

    Raises ConfigError for a bad file of API keys.
    """
    app = FastAPI(title="Manta", docs_url=None, redoc_url=None)
    api_keys = None if gate.api_keys_file is None else ApiKeys(Path(gate.api_keys_file))
    document = openapi_document(VERSION, with_keys=gate.api_keys_file is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]  # the way FastAPI's manual gives
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await json_of(request))
        model = find(body.model)
        answer = await model.chat(body, header(request, body, "chatcmpl", model), RequestContext.of(request, body))
        return await _answered(request, body, answer)

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        body = parse(CompletionBody, await json_of(request))
        model = find(body.model)
        answer = await model.completion(body, header(request, body, "cmpl", model), RequestContext.of(request, body))
        return await _answered(request, body, answer)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await json_of(request))
        return _json(await find(body.model).tokenize(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await json_of(request))
        return _json(await find(body.model).detokenize(body))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList([card(model) for model in models.values()]))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return _json(card(find(name)))

    @app.get("/version")
    async def version() -> Response:
        return _json(Version())

    @app.get("/load")
    async def load() -> Response:
        return _json(Load(sum(m.admission.num_waiting + m.admission.num_running for m in models.values())))

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def health() -> Response:
        """200 if every model has a replica that makes progress, or is scaled to zero."""
        await asyncio.gather(*(model.check_health() for model in models.values()))
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        pools = {name: model.pool for name, model in models.items()}
        return Response(await render_metrics(pools, telemetry), media_type=CONTENT_TYPE)

    @app.get("/debug/handoffs")
    async def handoffs() -> Response:
        return _json(await live_handoffs({name: model.pool for name, model in models.items()}))

    @app.get("/debug/requests/{name:path}")
    async def explain(name: str) -> Response:
        return _json(await request_timeline(name, telemetry, {name: model.pool for name, model in models.items()}))

    @app.exception_handler(ServingError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    app.add_middleware(AuthMiddleware, api_keys=api_keys, max_body_bytes=gate.max_body_bytes)
    app.add_middleware(MetricsMiddleware, telemetry=telemetry)  # the last one is the outermost: it sees every answer

    def find(name: str | None) -> ServedModel:
        if not name:
            if len(models) > 1:
                raise RequestError(f"model is required; served here: {', '.join(models)}", "model")
            return next(iter(models.values()))
        if name not in models:
            raise ModelNotFound(name, list(models))
        return models[name]

    def header(request: Request, body: GenerationBody, prefix: str, model: ServedModel) -> ResponseMeta:
        """Serve sends the request's id back as X-Request-Id, and makes one up if the client does not."""
        field = "X-Request-Id" if body.request_id is None else "request_id"
        given = body.request_id or request.headers.get("x-request-id", "")
        if len(given) > MAX_REQUEST_ID or not (given.isascii() and given.isprintable()):
            raise InvalidParameter(field, given, f"at most {MAX_REQUEST_ID} printable ASCII characters")
        return ResponseMeta(f"{prefix}-{given or uuid.uuid4().hex}", int(time.time()), model.info.name)

    def card(model: ServedModel) -> ModelCard:
        return ModelCard(model.info.name, started, model.info.root, model.info.max_model_len)

    return app


async def json_of(request: Request) -> bytes:
    """The body. Raises UnsupportedMediaType, and BodyTooLarge while reading it."""
    content_type = request.headers.get("content-type")
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaType(content_type)
    return await request.body()


async def _answered(request: Request, body: GenerationBody, answer: ChatAnswer | CompletionAnswer) -> Response:
    if body.stream:
        return await while_connected(request, stream(answer.chunks()))
    return _json(await while_connected(request, answer.whole()))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

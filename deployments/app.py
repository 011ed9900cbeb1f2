"""The HTTP application: the routes of all APIs. They know nothing of Ray: an ingress passes in the models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from deployments.anthropic.routes import add_anthropic_routes
from deployments.console.config import ConsoleConfig
from deployments.console.routes import add_console_routes
from deployments.http.debug import VERSION
from deployments.http.errors import error_response
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.middleware import AuthConfig, AuthMiddleware, RootPathMiddleware
from deployments.idempotency.answers import Answers
from deployments.observability.telemetry import MetricsMiddleware, Telemetry
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.routes import add_batch_routes
from deployments.openai.responses.routes import add_responses_routes
from deployments.openai.responses.store import ResponseStore
from deployments.openai.routes import add_openai_routes
from deployments.openai.served_model import ServedModel
from deployments.openai.served_models import ServedModels
from deployments.openapi import openapi_document
from deployments.operator_routes import add_operator_routes
from deployments.pooling.routes import add_pooling_routes
from deployments.storage.config import StoreConfig, open_store
from engine.errors import ServingError


def http_app(
    models: Mapping[str, ServedModel],
    telemetry: Telemetry,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
    batches: BatchConfig = BatchConfig(),  # noqa: B008  frozen
    store: StoreConfig = StoreConfig(),  # noqa: B008  frozen
    console: ConsoleConfig = ConsoleConfig(),  # noqa: B008  frozen
) -> FastAPI:
    """Build the application. Raises ConfigError for a bad file of API keys.

    models: by the names they are served under.
    """
    app = FastAPI(title="Manta", docs_url=None, redoc_url=None, redirect_slashes=False)
    api_keys = auth.keys()
    document = openapi_document(VERSION, with_keys=api_keys is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]  # the way FastAPI's manual gives
    served, values = ServedModels(models), open_store(store)
    telemetry.stats.store_errors = values.errors
    answers = Answers(values, store.idempotency_ttl_s)
    idempotent = IdempotentRoutes(answers)
    add_openai_routes(app, served, idempotent, auth.unknown_fields)
    add_anthropic_routes(app, served, idempotent, auth.unknown_fields)
    add_responses_routes(app, served, ResponseStore(values, store.response_ttl_s), idempotent, auth.unknown_fields)
    idempotent.add_stream_route(app)
    add_batch_routes(app, served, batches, auth.cors_origins, auth.unknown_fields)
    app.router.lifespan_context = _then(app.router.lifespan_context, answers.close)
    add_pooling_routes(app, served, auth.unknown_fields)
    add_operator_routes(app, served, telemetry)
    if console.enabled:
        add_console_routes(app, served, telemetry, console)

    @app.exception_handler(ServingError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    app.add_middleware(AuthMiddleware, api_keys=api_keys, config=auth)
    if auth.cors_origins:  # outside of the check of keys: a browser's first question has none
        app.add_middleware(CORSMiddleware, allow_origins=auth.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(MetricsMiddleware, telemetry=telemetry)  # it sees every response
    # the last one is the outermost: the others see all requests alike
    app.add_middleware(RootPathMiddleware, root_path=auth.root_path)
    return app


def _then(
    lifespan: Callable[[Any], AbstractAsyncContextManager[Any]], close: Callable[[], Awaitable[None]]
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return the lifespan of an application with something to close at its end."""

    @asynccontextmanager
    async def both(app: FastAPI) -> AsyncGenerator[Any]:
        async with lifespan(app) as state:
            try:
                yield state
            finally:
                await close()

    return both

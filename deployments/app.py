"""The HTTP application: routes of all APIs. Independent of Ray: an ingress passes in the models."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from deployments.anthropic.routes import AnthropicRoutes
from deployments.http.bodies import Bodies
from deployments.http.debug import VERSION
from deployments.http.errors import error_response
from deployments.http.first_token import FirstTokenMiddleware
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.middleware import AuthConfig, AuthMiddleware, RootPathMiddleware
from deployments.http.origin import OriginMiddleware
from deployments.http.route import KEY, Route, add_routes, open_paths
from deployments.jobs.jobs import Jobs
from deployments.observability.telemetry import MetricsMiddleware, Telemetry
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.routes import BatchRoutes
from deployments.openai.responses.routes import ResponsesRoutes
from deployments.openai.responses.store import ResponseStore
from deployments.openai.routes import OpenAIRoutes
from deployments.openai.served.served_model import ServedModel
from deployments.openai.served.served_models import ServedModels
from deployments.openapi import openapi_document
from deployments.options.console import ConsoleConfig
from deployments.parts.setup import EdgeSetup
from deployments.parts.table import edge_parts, part_fields, part_metrics
from deployments.pooling.routes import PoolingRoutes
from deployments.quotas.quotas import Quotas
from deployments.storage.config import StoreConfig, open_store
from engine.errors import ServingError

logger = logging.getLogger(__name__)


def http_app(
    models: Mapping[str, ServedModel],
    telemetry: Telemetry,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
    batches: BatchConfig = BatchConfig(),  # noqa: B008  frozen
    store: StoreConfig = StoreConfig(),  # noqa: B008  frozen
    console: ConsoleConfig = ConsoleConfig(),  # noqa: B008  frozen
    scope: str | None = None,
) -> FastAPI:
    """Build the application. Raises ConfigError for an invalid file of API keys.

    models: served models by name. scope: name of the application on Serve; None for a single ingress.
    """
    app = FastAPI(title="Manta", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    api_keys = auth.keys()
    served, values = ServedModels(models), open_store(store)
    telemetry.stats.store_errors = values.errors
    jobs, quotas = Jobs(values, store.idempotency_ttl_s), Quotas(values, auth.key_limits, auth.num_ingresses)
    idempotent = IdempotentRoutes(jobs)
    bodies = Bodies(auth.unknown_fields, part_fields())
    batch_routes = BatchRoutes(app, served, batches, auth, bodies, values if values.shared else None)
    stored = ResponseStore(values, store.response_ttl_s)
    parts_by_name = edge_parts(
        EdgeSetup(
            models=served,
            telemetry=telemetry,
            auth=auth,
            bodies=bodies,
            api_keys=api_keys,
            quotas=quotas,
            store=values,
            console=console,
            scope=scope,
            metrics=part_metrics(),
        )
    )
    parts = parts_by_name.values()
    served.further += [found for part in parts if (found := part.further_models()) is not None]
    routes = [
        *OpenAIRoutes(served, idempotent, bodies).routes(),
        *PoolingRoutes(served, bodies).routes(),
        *AnthropicRoutes(served, idempotent, bodies).routes(),
        *ResponsesRoutes(served, stored, idempotent, bodies, [part.response_deleted for part in parts]).routes(),
        *idempotent.routes(),
        *batch_routes.routes(),
        *(route for part in parts for route in part.routes()),
    ]
    batches_running = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part.running())
            ended = [channel.all_ended for channel in {model.frontend.channel for model in models.values()}]
            for close in (values.close, quotas.close, *ended, jobs.close):  # called in reverse
                stack.push_async_callback(close)
            yield await stack.enter_async_context(batches_running(app))

    app.router.lifespan_context = lifespan
    document = cache(partial(openapi_document, routes, VERSION, with_keys=api_keys is not None))

    async def openapi(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        return JSONResponse(document() | ({"servers": [{"url": root}]} if root else {}))

    routes.append(Route(KEY, "GET", "/openapi.json", openapi))
    add_routes(app, routes)
    app.state.routes = routes  # for the table in docs/security.md
    app.state.parts = parts_by_name
    if api_keys is not None and not auth.admin_keys:
        logger.warning("no key may call the routes for admins, since ingress.admin_keys has no name (docs/security.md)")

    @app.exception_handler(ServingError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    app.add_middleware(FirstTokenMiddleware)
    for each in [each for part in parts for each in part.middleware()]:
        app.add_middleware(each.cls, *each.args, **each.kwargs)
    app.add_middleware(AuthMiddleware, api_keys=api_keys, config=auth, open_paths=open_paths(routes))
    hosts = auth.allowed_hosts if auth.is_on_loopback and api_keys is None else None
    app.add_middleware(OriginMiddleware, allowed_origins=auth.allowed_origins, allowed_hosts=hosts)
    if auth.allowed_origins:  # outside the check of keys: a browser's preflight request has no key
        app.add_middleware(CORSMiddleware, allow_origins=auth.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(MetricsMiddleware, telemetry=telemetry)  # it sees every response
    # added last, so outermost: the other middleware sees requests without the root path
    app.add_middleware(RootPathMiddleware, root_path=auth.root_path)
    return app

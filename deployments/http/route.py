"""A route: what serves it, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class Route:
    method: Literal["GET", "POST", "DELETE"]
    """GET stands for HEAD too."""
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str = ""
    """For the OpenAPI document, which leaves out routes without one."""
    _: KW_ONLY
    body: type[BaseModel] | None = None
    """Of the request; with GET its query."""
    result: type[msgspec.Struct] | str | None = None
    """Body of the response, or its media type."""
    streams: bool = False
    """The response may be a stream of events as well."""
    body_type: str = "application/json"
    dependencies: Sequence[Any] = ()
    """FastAPI's, which run before the handler."""


def add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    for route in routes:
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)  # servers leave the body of HEAD out
        app.add_api_route(route.path, route.handler, methods=[*methods], dependencies=route.dependencies)

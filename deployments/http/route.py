"""A route: its handler, and its entry in the OpenAPI document."""

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
    """GET includes HEAD."""
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str = ""
    """Summary in the OpenAPI document, which leaves out routes without one."""
    _: KW_ONLY
    body: type[BaseModel] | None = None
    """Type of the request's body; for GET, of its query."""
    result: type[msgspec.Struct] | str | None = None
    """Type of the response's body, or its media type."""
    streams: bool = False
    """Whether the response may also be a stream of events."""
    body_type: str = "application/json"
    dependencies: Sequence[Any] = ()
    """FastAPI dependencies, which run before the handler."""


def add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    for route in routes:
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)  # servers leave the body of HEAD out
        app.add_api_route(route.path, route.handler, methods=[*methods], dependencies=route.dependencies)

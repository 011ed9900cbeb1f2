"""A route: its handler, who may call it, and its entry in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from deployments.http.context import check_admin


class Audience(StrEnum):
    """Who may call a route of a server with API keys. Without keys, everybody may call every route."""

    OPEN = "everybody, without a key"
    KEY = "any key"
    OWNER = "any key, for what is its own"
    ADMIN = "keys of `ingress.admin_keys`"


OPEN, KEY, OWNER, ADMIN = Audience


@dataclass(frozen=True, slots=True)
class Route:
    audience: Audience
    method: Literal["GET", "POST", "DELETE"]
    """GET includes HEAD."""
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str = ""
    """Summary in the OpenAPI document, which leaves out routes without one."""
    _: KW_ONLY
    of_others: str = "nothing"
    """What a caller learns of other keys and does to them, for docs/security.md."""
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
        admin = [Depends(check_admin)] if route.audience is ADMIN else []
        app.add_api_route(route.path, route.handler, methods=[*methods], dependencies=[*admin, *route.dependencies])


def open_paths(routes: Iterable[Route]) -> frozenset[str]:
    """Return the paths that need no API key."""
    return frozenset(route.path for route in routes if route.audience is OPEN)

"""Facts about a request that are not in its body: its client, id and time limit."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.requests import Request

from deployments.errors import NotPermitted
from deployments.http.body import EngineBody
from deployments.jobs.source import GenerationSource, LiveSource
from deployments.routing.session import check_id, session_of
from engine.errors import InvalidParameter

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_REQUEST_ID = 128
API_KEY_NAME = "api_key_name"
"""Key in a request's state: the name of its API key, on a server with keys."""
IS_ADMIN = "is_admin"
"""Key in a request's state: whether its API key is one of `ingress.admin_keys`, or the server has no keys."""
ALLOWED_MODELS = "allowed_models"
"""Key in a request's state: the names of models that its API key is limited to; None for all."""
BACKGROUND_CLIENT = "background_client"
"""Key in the state of a request that this server sends to itself: its client, whose API key was already checked."""

SOURCE = "source"
"""Key in a request's state: its GenerationSource, if that is not a LiveSource."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    response_id: str
    """`id` of the response and of all its chunks."""
    created: int
    """Seconds since 1970."""
    client: str
    """Client whose fair share the request uses."""
    timeout_s: float | None = None
    """Time limit that the client asks for, in seconds; None for the server's."""
    session_id: str = ""
    """Session id: requests of one session should go to one engine, which caches what they share; empty for none."""
    background: bool = False
    """Whether all other requests take precedence over this one."""
    source: GenerationSource = field(default_factory=LiveSource)
    """Source of the tokens."""

    @classmethod
    def of(cls, request: Request, body: EngineBody, id_prefix: str) -> RequestContext:
        """Read the headers. Raises InvalidParameter for a bad request id, session id or timeout."""
        headers = request.headers
        id_field = "X-Request-Id" if body.request_id is None else "request_id"
        # if the client sends no id, Serve makes one up and returns it as X-Request-Id
        request_id = body.request_id or headers.get("x-request-id", "")
        check_id(id_field, request_id, MAX_REQUEST_ID)
        source = source_of(request)
        return cls(
            response_id=f"{id_prefix}{request_id or uuid.uuid4().hex}",
            created=source.created,
            client=_client(request, body),
            timeout_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
            session_id=session_of(headers, body.session_id, body.user),
            background=hasattr(request.state, BACKGROUND_CLIENT),
            source=source,
        )


def source_of(request: Request) -> GenerationSource:
    source: GenerationSource | None = getattr(request.state, SOURCE, None)
    return source or LiveSource()


def key_name(request: Request) -> str | None:
    """Return the name of the request's API key; None on a server without keys."""
    name: str | None = getattr(request.state, API_KEY_NAME, None)
    return name


def is_admin(request: Request) -> bool:
    """Return whether the request's API key is one of `ingress.admin_keys`, or the server has no keys."""
    return bool(getattr(request.state, IS_ADMIN, False))


async def check_admin(request: Request) -> None:
    """Raise NotPermitted unless the request may do what only admins may."""
    if not is_admin(request):
        raise NotPermitted(f"only keys of ingress.admin_keys may send {request.method} {request.url.path}")


def key_client(request: Request) -> str | None:
    """Return the client of the request's API key; None on a server without keys."""
    name = key_name(request)
    return None if name is None else f"key:{name}"


def allowed_models(request: Request) -> frozenset[str] | None:
    """Return the names of the models that the request may use; None for all."""
    allowed: frozenset[str] | None = getattr(request.state, ALLOWED_MODELS, None)
    return allowed


def _client(request: Request, body: EngineBody) -> str:
    """Return the client to which fairness applies: the API key's name or, on a server without keys, the user in the
    body or else the client's address. With keys, the user in the body is ignored: a client could name many users, and
    get the share of each."""
    if (background := getattr(request.state, BACKGROUND_CLIENT, None)) is not None:
        return str(background)
    if (client := key_client(request)) is not None:
        return client
    if user := body.user or body.safety_identifier:
        return f"user:{user}"
    return f"address:{request.client.host if request.client else ''}"


def _timeout_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 16 and int(header) > 0):
        raise InvalidParameter(TIMEOUT_HEADER, header, "a whole number of milliseconds above 0")
    return int(header) / 1000

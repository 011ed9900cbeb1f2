"""Facts about a request that are not in its body: its client, its id, and its time limit."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.requests import Request

from deployments.http.body import EngineBody
from deployments.jobs.source import GenerationSource, LiveSource
from engine.errors import InvalidParameter

TIMEOUT_HEADER = "x-request-timeout-ms"
SESSION_HEADER = "x-session-id"  # the header of Serve's HAProxy, which then also chooses the same ingress
MAX_SESSION_ID = 256
MAX_REQUEST_ID = 128
API_KEY_NAME = "api_key_name"
"""In the state of a request: the name of its API key, on a server with keys."""
BACKGROUND_CLIENT = "background_client"
"""Key in the state of a request that this server sends to itself: the client, whose API key was checked before."""

SOURCE = "source"
"""In the state of a request: its GenerationSource, if it is not a LiveSource."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of one HTTP request."""

    response_id: str
    """`id` of the response and of all its chunks."""
    created: int
    """Seconds since 1970."""
    client: str
    """Client whose fair share the request counts to."""
    timeout_s: float | None = None
    """Time limit that the client asks for; None leaves it to the server."""
    session_id: str = ""
    """Requests with the same id should meet in one engine, which caches what they share; empty for none."""
    background: bool = False
    """The request can wait for all others."""
    source: GenerationSource = field(default_factory=LiveSource)
    """Where the tokens come from."""

    @classmethod
    def of(cls, request: Request, body: EngineBody, id_prefix: str) -> RequestContext:
        """Read the headers. Raises InvalidParameter for a bad request id, session id or timeout."""
        headers = request.headers
        id_field = "X-Request-Id" if body.request_id is None else "request_id"
        # Serve makes an id up if the client sends none, and sends it back as X-Request-Id
        request_id = body.request_id or headers.get("x-request-id", "")
        _check_id(id_field, request_id, MAX_REQUEST_ID)
        in_header = headers.get(SESSION_HEADER)
        session_id = in_header or body.session_id or ""
        _check_id(SESSION_HEADER if in_header else "session_id", session_id, MAX_SESSION_ID)
        source: GenerationSource = getattr(request.state, SOURCE, None) or LiveSource()
        return cls(
            response_id=f"{id_prefix}-{request_id or uuid.uuid4().hex}",
            created=source.created,
            client=_client(request, body),
            timeout_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
            session_id=session_id,
            background=hasattr(request.state, BACKGROUND_CLIENT),
            source=source,
        )


def key_name(request: Request) -> str | None:
    """Return the name of the request's API key; None on a server without keys."""
    name: str | None = getattr(request.state, API_KEY_NAME, None)
    return name


def _client(request: Request, body: EngineBody) -> str:
    """Return the API key's name; without keys, the user that the body names; else the client's address.

    With keys the body is not trusted, or one client could take the shares of many.
    """
    if (background := getattr(request.state, BACKGROUND_CLIENT, None)) is not None:
        return str(background)
    if (name := key_name(request)) is not None:
        return f"key:{name}"
    if user := body.user or body.safety_identifier:
        return f"user:{user}"
    return f"address:{request.client.host if request.client else ''}"


def _check_id(field: str, value: str, max_length: int) -> None:
    if len(value) > max_length or not (value.isascii() and value.isprintable()):
        raise InvalidParameter(field, value, f"at most {max_length} printable ASCII characters")


def _timeout_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 16 and int(header) > 0):
        raise InvalidParameter(TIMEOUT_HEADER, header, "a whole number of milliseconds above 0")
    return int(header) / 1000

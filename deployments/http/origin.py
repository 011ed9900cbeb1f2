"""Refuses what a browser sends for a web page of somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import NotPermitted
from deployments.http.errors import error_response

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PORTS = {"http": 80, "https": 443}


class OriginMiddleware:
    """ASGI middleware that refuses requests from pages of other origins that could change something, and, where hosts
    are checked, all requests under a foreign name.

    A page of another origin can send some requests without asking (forms, an empty POST), though it cannot read the
    answers. If its name is bound to this server's address after it was loaded (DNS rebinding), it has the same origin
    and can read them: then only the name tells it from a page of this server.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str], allowed_hosts: Sequence[str] | None):
        """allowed_origins: further origins that may send requests; `*` for all. allowed_hosts: names by which the
        server may be called besides LOCAL_HOSTS, `*` for all; None for all."""
        self._app, self._origins = app, frozenset(allowed_origins)
        self._any_origin = "*" in allowed_origins
        self._hosts = None
        if allowed_hosts is not None and "*" not in allowed_hosts:
            self._hosts = LOCAL_HOSTS | {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            await error_response(NotPermitted(problem), scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")  # browsers always send it
        if self._hosts is not None:
            for host in hosts:
                if _authority(f"//{host}")[0] not in self._hosts:
                    return f"the host {host[:100]!r} is not one of this server's names; see ingress.allowed_hosts"
        if scope["method"] in CHANGING and not self._any_origin:
            for origin in headers.getlist("origin"):
                if origin not in self._origins and not any(_is_own(origin, host) for host in hosts):
                    what = f"pages of {origin[:100]!r} may not send {scope['method']} requests"
                    return f"{what}; see ingress.allowed_origins"
        return None


def _is_own(origin: str, host: str) -> bool:
    """Return whether a page of this origin comes from this host. The scheme may differ, since a proxy in front may end
    TLS."""
    scheme = origin.partition("://")[0]
    if scheme not in PORTS:
        return False
    name, port = _authority(origin)
    of_host = _authority(f"//{host}")
    return bool(name) and name == of_host[0] and (port or PORTS[scheme]) == (of_host[1] or PORTS[scheme])


def _authority(url: str) -> tuple[str, int | None]:
    """Return name and port of a URL; an empty name if it has none, or anything else."""
    try:
        parts = urlsplit(url)
        if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            return "", None
        return (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        return "", None

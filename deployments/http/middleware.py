"""Checks that every request has to pass before a route sees it: headers, the API key, and the size of the body."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.frontend.api_keys import ApiKeys
from deployments.http.context import API_KEY_NAME, BACKGROUND_CLIENT
from deployments.http.errors import error_response, get_path
from deployments.http.server_header import SERVER_HEADER, SERVER_VARIABLE
from deployments.http.validation import UnknownFields
from engine.errors import (
    BodyTimeout,
    BodyTooLarge,
    EngineUnavailable,
    InvalidParameter,
    ServingError,
    UnsupportedMediaType,
)

OPEN_PATHS = ("/health", "/")  # for probes, which have no key; and for browsers, whose page asks for it
OPEN_PREFIX = "/console/page/"  # the other files of that page
UPLOAD_PATH = "/v1/files"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    api_keys_file: str | None = None
    """File of ApiKeys."""
    api_keys: tuple[str, ...] = ()
    """Further keys, as lines of such a file. Without any key all clients are admitted."""
    root_path: str = ""
    """Prefix of all paths at a proxy in front, which may keep it in requests or take it off."""
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    """Seconds from the first byte of a request to the last byte of its body."""
    max_upload_bytes: int = 200 * 2**20
    """Limit for bodies of UPLOAD_PATH, which have accordingly more time than others."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may send requests from a browser; `*` for all."""
    unknown_fields: UnknownFields = "ignore"
    """What becomes of fields that no API here has."""

    def keys(self) -> ApiKeys | None:
        """Return the keys that are admitted; None for all clients. Raises ConfigError."""
        if self.api_keys_file is None and not self.api_keys:
            return None
        return ApiKeys(None if self.api_keys_file is None else Path(self.api_keys_file), self.api_keys)


def is_open(path: str) -> bool:
    """Return whether a path takes no API key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def around_serve() -> list[Middleware]:
    """Return what Serve is to put around all that it does with a request itself; a variable names this function
    (cluster/ray_environment.py)."""
    return [Middleware(HeadersMiddleware, os.environ.get(SERVER_VARIABLE))]


class HeadersMiddleware:
    """ASGI middleware that refuses headers which are not UTF-8, and what was sent to another server of the machine."""

    def __init__(self, app: ASGIApp, server: str | None = None):
        """server: the id of this one; None if it does not know."""
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if (error := self._problem(name, value)) is not None:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, name: bytes, value: bytes) -> ServingError | None:
        if not value.isascii() and not _is_utf8(value):
            return InvalidParameter(name.decode("latin-1"), value.decode("utf-8", "replace"), "text in UTF-8")
        # the HAProxy of a server that was killed may still have connections, and another server its ports
        if self._server is not None and name == SERVER_HEADER.encode() and value.decode() != self._server:
            return EngineUnavailable("the server that this request was sent to has ended; send it again")
        return None


class RootPathMiddleware:
    """ASGI middleware that adds the prefix of a proxy to the path where the proxy has taken it off.

    Serve's own proxy calls no prefix "/", which would take the page at "/" for the prefix itself.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, root_path = scope["path"], self._root_path
            if not f"{path}/".startswith(f"{root_path}/"):
                path = root_path + path
            scope = {**scope, "path": path, "root_path": root_path + scope.get("root_path", "").rstrip("/")}
        await self._app(scope, receive, send)


class AuthMiddleware:
    """ASGI middleware that stores the name of the key in the request's state."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys | None, config: AuthConfig):
        self._app, self._api_keys, self._config = app, api_keys, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ServingError as error:
            await error_response(error, scope)(scope, receive, send)
        else:
            limit = self._max_bytes(scope)
            timeout_s = self._config.body_timeout_s * max(1.0, limit / self._config.max_body_bytes)
            await self._app(scope, _BodyLimit(receive, limit, timeout_s), send)

    def _check(self, scope: Scope) -> None:
        """Raises InvalidApiKey, UnsupportedMediaType or BodyTooLarge."""
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        if self._api_keys is not None and not is_open(get_path(scope)) and BACKGROUND_CLIENT not in state:
            state[API_KEY_NAME] = self._api_keys.name_of(_key(headers))
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("identity", ""):
            raise UnsupportedMediaType(encoding, "identity", "Content-Encoding")
        length = headers.get("content-length", "")
        limit = self._max_bytes(scope)
        if length.isdecimal() and len(length) < 20 and int(length) > limit:
            raise BodyTooLarge(limit)

    def _max_bytes(self, scope: Scope) -> int:
        return self._config.max_upload_bytes if get_path(scope) == UPLOAD_PATH else self._config.max_body_bytes


class _BodyLimit:
    """A `receive` that counts bytes, because a chunked body does not announce its length, and has a deadline."""

    def __init__(self, receive: Receive, limit: int, timeout_s: float):
        self._receive, self._limit, self._bytes = receive, limit, 0
        self._timeout_s = timeout_s
        self._deadline: float | None = asyncio.get_running_loop().time() + timeout_s  # None: it is all here

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(self._timeout_s) from None
        if not message.get("more_body"):
            self._deadline = None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._limit:
            raise BodyTooLarge(self._limit)
        return message


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _key(headers: Headers) -> str | None:
    """Return the API key, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")

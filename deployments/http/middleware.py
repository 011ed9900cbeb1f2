"""Checks that every request must pass before it reaches a route: headers, API key, and body size."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType
from deployments.frontend.api_keys import ApiKeys
from deployments.http.context import ALLOWED_MODELS, API_KEY_NAME, BACKGROUND_CLIENT, IS_ADMIN
from deployments.http.errors import error_response, get_path
from deployments.http.server_header import SERVER_HEADER, SERVER_VARIABLE
from deployments.http.validation import UnknownFields
from deployments.quotas.limits import KeyLimits
from engine.errors import EngineUnavailable, InvalidParameter, ServingError

UPLOAD_PATH = "/v1/files"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    api_keys_file: str | None = None
    """File of API keys (ApiKeys)."""
    api_keys: Sequence[str] = ()
    """Further keys, as lines of such a file. Without any keys all clients are admitted."""
    admin_keys: Sequence[str] = ()
    """Names of the keys that may call the routes of Audience.ADMIN. On a server without keys, everybody may."""
    allow_runtime_key_updating: bool = False
    """Whether requests with these keys may make and change keys."""
    allow_runtime_lora_updating: bool = False
    """Whether requests may load and unload adapters."""
    root_path: str = ""
    """Prefix of all paths at a proxy in front. The proxy may or may not strip it."""
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    """Seconds from the first byte of a request to the last byte of its body."""
    max_upload_bytes: int = 200 * 2**20
    """Limit for bodies at UPLOAD_PATH. Their time limit is proportionally longer."""
    allowed_origins: Sequence[str] = ()
    """Origins of web pages that may send requests from a browser; `*` for all."""
    allowed_hosts: Sequence[str] = ()
    """Names by which clients may call the server besides those of this machine, if only this machine reaches it and it
    has no keys; `*` for all."""
    is_on_loopback: bool = False
    """Whether only this machine reaches the server."""
    unknown_fields: UnknownFields = "ignore"
    """Whether fields that no API here has are ignored or refused."""
    key_limits: Mapping[str, KeyLimits] = field(default_factory=dict)
    """Limits by the names of keys."""
    num_ingresses: int = 1
    """Number of ingresses that share the limits."""

    @property
    def has_keys(self) -> bool:
        return self.api_keys_file is not None or bool(self.api_keys)

    def keys(self) -> ApiKeys | None:
        """Return the admitted keys; None to admit all clients. Raises ConfigError."""
        if not self.has_keys:
            return None
        return ApiKeys(None if self.api_keys_file is None else Path(self.api_keys_file), self.api_keys)


def around_serve() -> list[Middleware]:
    """Return the middleware that Serve puts around its own handling of requests; an environment variable names this
    function (cluster/ray_environment.py)."""
    return [Middleware(HeadersMiddleware, os.environ.get(SERVER_VARIABLE))]


class HeadersMiddleware:
    """ASGI middleware that refuses non-UTF-8 headers and requests meant for another server on this machine."""

    def __init__(self, app: ASGIApp, server: str | None = None):
        """server: id of this server; None if it is unknown."""
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
        # the HAProxy of a killed server may still have connections, while another server has taken over its ports
        if self._server is not None and name == SERVER_HEADER.encode() and value.decode() != self._server:
            return EngineUnavailable("the server to which this request was sent has ended; send it again")
        return None


class RootPathMiddleware:
    """ASGI middleware that restores the prefix of a proxy in the path if the proxy has stripped it.

    Serve's own proxy calls an empty prefix "/", and would mistake the page at "/" for the prefix itself.
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
    """ASGI middleware that checks the API key and the body's size, and stores the key's name in the request's
    state."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys | None, config: AuthConfig, open_paths: Collection[str]):
        """open_paths: paths that need no key."""
        self._app, self._api_keys, self._config = app, api_keys, config
        self._open_paths = open_paths

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
        """Check a request's headers. Raises InvalidApiKey, UnsupportedMediaType or BodyTooLarge."""
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        if self._api_keys is not None and BACKGROUND_CLIENT in state:
            state[ALLOWED_MODELS] = self._api_keys.models_of(state.get(API_KEY_NAME, ""))
        elif self._api_keys is not None and get_path(scope) not in self._open_paths:
            key = self._api_keys.find(_key(headers))
            state[API_KEY_NAME], state[ALLOWED_MODELS] = key.name, key.models
        state[IS_ADMIN] = self._api_keys is None or state.get(API_KEY_NAME) in self._config.admin_keys
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
    """A `receive` with a deadline that counts bytes, because a chunked body does not announce its length."""

    def __init__(self, receive: Receive, limit: int, timeout_s: float):
        self._receive, self._limit, self._bytes = receive, limit, 0
        self._timeout_s = timeout_s
        self._deadline: float | None = asyncio.get_running_loop().time() + timeout_s  # None once the body is complete

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
    """Return the API key, from OpenAI's or Anthropic's header."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")

"""Checks that every request has to pass before a route sees it: the API key and the size of the body."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.frontend.api_keys import ApiKeys
from deployments.openai.errors import error_response
from engine.errors import BodyTooLarge, ServingError

OPEN_PATH = "/health"  # for probes, which have no key


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    api_keys_file: str | None = None
    """File of ApiKeys; None lets everybody in."""
    max_body_bytes: int = 16 * 2**20


class AuthMiddleware:
    """ASGI middleware that stores the name of the key as `api_key_name` in the request's state."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys | None, max_body_bytes: int):
        self._app, self._api_keys, self._max_body_bytes = app, api_keys, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ServingError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, _BodyLimit(receive, self._max_body_bytes), send)

    def _check(self, scope: Scope) -> None:
        """Raises InvalidApiKey or BodyTooLarge."""
        headers = Headers(scope=scope)
        if self._api_keys is not None and get_path(scope) != OPEN_PATH:
            scope.setdefault("state", {})["api_key_name"] = self._api_keys.name_of(headers.get("authorization"))
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > self._max_body_bytes:
            raise BodyTooLarge(self._max_body_bytes)


class _BodyLimit:
    """A `receive` that counts bytes, because a chunked body does not announce its length."""

    def __init__(self, receive: Receive, limit: int):
        self._receive, self._limit, self._bytes = receive, limit, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._limit:
            raise BodyTooLarge(self._limit)
        return message


def get_path(scope: Scope) -> str:
    """Return the path without the prefix that the application is mounted under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

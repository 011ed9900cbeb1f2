"""Reads what requests say of their sessions, around all that handles them."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.context import API_KEY_NAME
from deployments.http.errors import error_response
from deployments.parts.sessions.books import SessionBooks
from deployments.parts.sessions.call import SessionCall, current
from engine.errors import InvalidParameter

WRITTEN_S = 1.0
"""Seconds after its answer for which a request waits until its turn is written."""


class SessionMiddleware:
    """ASGI middleware. Once it has ended, the books have the turn, if the store answers."""

    def __init__(self, app: ASGIApp, books: SessionBooks):
        self._app, self._books = app, books

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            call = SessionCall.of(Headers(scope=scope), self._books, scope.get("state", {}).get(API_KEY_NAME) or "")
        except InvalidParameter as error:
            await error_response(error, scope)(scope, receive, send)
            return
        with current(call):
            await self._app(scope, receive, send)
        if call.turn is not None:
            await call.turn.written(WRITTEN_S)

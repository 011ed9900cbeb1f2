"""The header by which clients limit the time to the first token."""

from __future__ import annotations

import math

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.frontend.first_token import BOUND_HEADER, LIMIT_HEADER, FirstTokenDeadline, current
from deployments.http.errors import error_response
from engine.errors import InvalidParameter

MAX_DIGITS = 15


class FirstTokenMiddleware:
    """ASGI middleware that reads the limit of a request, and tells in the response's headers by when the first token
    probably comes. It does nothing for requests without a limit."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (given := Headers(scope=scope).get(LIMIT_HEADER)) is None:
            await self._app(scope, receive, send)
            return
        if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS and int(given) > 0):
            limit = "a whole number of milliseconds above 0"
            await error_response(InvalidParameter(LIMIT_HEADER, given, limit), scope)(scope, receive, send)
            return
        deadline = FirstTokenDeadline(int(given) / 1000)

        async def with_bound(message: Message) -> None:
            if message["type"] == "http.response.start" and math.isfinite(deadline.bound_s):
                MutableHeaders(scope=message)[BOUND_HEADER] = str(math.ceil(1000 * deadline.bound_s))
            await send(message)

        with current(deadline):
            await self._app(scope, receive, with_bound)

"""The limits of a request's API key, around all that handles the request."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.context import ALLOWED_MODELS, API_KEY_NAME
from deployments.http.errors import get_path, is_anthropic
from deployments.quotas.key_quota import RequestQuota
from deployments.quotas.quotas import Quotas, current


class QuotaMiddleware:
    """ASGI middleware that applies the limits of the key, whose name is in the request's state, to what the request
    computes, and adds what is left of them to the response's headers."""

    def __init__(self, app: ASGIApp, quotas: Quotas):
        self._app, self._quotas = app, quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        name = state.get(API_KEY_NAME) if self._quotas.limits else None
        quota = None if name is None else self._quotas.of(name)
        if name is None or quota is None:
            await self._app(scope, receive, send)
            return
        state[ALLOWED_MODELS] = self._quotas.models_of(name, state.get(ALLOWED_MODELS))
        with current(quota):
            await self._app(scope, receive, _with_headers(quota, is_anthropic(get_path(scope)), send))


def _with_headers(quota: RequestQuota, anthropic: bool, send: Send) -> Send:
    """Return a `send` that adds what is left of the limits to the response's headers."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers(anthropic=anthropic))
        await send(message)

    return with_headers

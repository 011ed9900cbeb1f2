"""Errors as HTTP responses, with OpenAI's error body, or with Anthropic's on its routes."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from deployments.errors import BodyTimeout, UnsupportedMediaType
from deployments.frontend.sequence import ReportedError
from deployments.observability.telemetry import CLIENT_LEFT
from deployments.quotas.errors import BudgetSpent, QuotaExceeded
from engine.errors import Overloaded, ServingError

logger = logging.getLogger(__name__)

ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# phrases in errors about a chat, and their equivalents for the Anthropic message from which the chat was made
ANTHROPIC_WORDS = {
    "tool_choice must be required or the name of a tool": "tool_choice must be of the type any or tool",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    "response_format.json_schema.schema": "output_config.format.schema",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicError
    request_id: str | None


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return the HTTP status and body of an error. An unexpected error is a bug of Manta: it is logged, and the client
    does not get its text."""
    match error:
        case ReportedError(info=info):
            return info.status, _body(info.message, info.type, info.param, info.code)
        case ServingError():
            return error.status, _body(str(error), error.type, error.param, error.code)
        case ClientDisconnect():
            return CLIENT_LEFT, _body("the client left", "invalid_request_error", None, "client_left")
        case HTTPException(status_code=404):
            return 404, _body("this route does not exist", "not_found_error", None, "route_not_found")
        case HTTPException(status_code=status, detail=detail):
            code = HTTPStatus(status).name.lower()
            return status, _body(str(detail), "invalid_request_error", None, code)
        case _:
            logger.error("unexpected error", exc_info=error)
            return 500, _body("the server failed; its log says why", "internal_error", None, "internal_error")


def anthropic_error_body(error: Exception, scope: Scope) -> tuple[int, AnthropicErrorBody]:
    """Return the HTTP status and Anthropic's body of an error."""
    status, body = error_body(error)
    message = body.error.message
    for ours, theirs in ANTHROPIC_WORDS.items():
        message = message.replace(ours, theirs)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, AnthropicErrorBody(AnthropicError(kind, message), request_id(scope))


def error_response(error: Exception, scope: Scope) -> Response:
    headers: dict[str, str] = {}
    status: int
    body: msgspec.Struct
    if is_anthropic(get_path(scope)):
        status, body = anthropic_error_body(error, scope)
        headers |= anthropic_headers(scope)
    else:
        status, body = error_body(error)
    if status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    budget = isinstance(error, BudgetSpent) or (isinstance(error, QuotaExceeded) and error.budget)
    if status in (408, 409) or budget:  # OpenAI's clients would retry by themselves, in vain
        headers["X-Should-Retry"] = "false"
    if isinstance(error, BodyTimeout):
        headers["Connection"] = "close"
    if isinstance(error, UnsupportedMediaType) and error.header == "Content-Encoding":
        headers["Accept-Encoding"] = "identity"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _body(message: str, kind: str, param: str | None, code: str) -> ErrorBody:
    return ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code))


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_headers(scope: Scope) -> dict[str, str]:
    """Return the headers that every response of Anthropic's API has."""
    found = request_id(scope)
    return {} if found is None else {"request-id": found}


def request_id(scope: Scope) -> str | None:
    return Headers(scope=scope).get("x-request-id")


def get_path(scope: Scope) -> str:
    """Return the path without the prefix at which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

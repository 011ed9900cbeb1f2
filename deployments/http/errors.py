"""Errors as HTTP responses, with OpenAI's error body."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deployments.frontend.sequence import ReportedError
from deployments.observability.telemetry import CLIENT_LEFT
from engine.errors import BodyTimeout, Overloaded, ServingError

logger = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return the HTTP status and body. An unexpected error is our bug: it is logged, and its text is not shown."""
    match error:
        case ReportedError(info=info):
            return info.status, _body(info.message, info.type, info.param, info.code)
        case ServingError():
            return error.status, _body(str(error), error.type, error.param, error.code)
        case ClientDisconnect():
            return CLIENT_LEFT, _body("the client left", "invalid_request_error", None, "client_left")
        case HTTPException(status_code=404):
            return 404, _body("there is no such route", "not_found_error", None, "route_not_found")
        case HTTPException(status_code=status, detail=detail):
            code = HTTPStatus(status).name.lower()
            return status, _body(str(detail), "invalid_request_error", None, code)
        case _:
            logger.error("unexpected error", exc_info=error)
            return 500, _body("the server failed; its log says why", "internal_error", None, "internal_error")


def error_response(error: Exception) -> Response:
    status, body = error_body(error)
    headers = {}
    if status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    if status == 408:  # OpenAI's clients would send it again by themselves, to wait as long as before
        headers["X-Should-Retry"] = "false"
    if isinstance(error, BodyTimeout):
        headers["Connection"] = "close"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _body(message: str, kind: str, param: str | None, code: str) -> ErrorBody:
    return ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code))

"""Functions that read and write JSON bodies."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import UnsupportedMediaType
from deployments.http.validation import check_json_size, warning


async def read_json(request: Request) -> bytes:
    """Return the raw body. Raises UnsupportedMediaType, BodyTooLarge while reading, or RequestError for too many
    values."""
    content_type = request.headers.get("content-type")
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaType(content_type)
    body = await request.body()
    await check_json_size(body)
    return body


def json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def with_warning(ignored: list[str], response: Response) -> Response:
    """Return the response with a Warning header that names the request's fields that had no effect."""
    if ignored:
        response.headers["Warning"] = warning(ignored)
    return response

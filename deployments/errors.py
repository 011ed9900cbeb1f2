"""Errors of the HTTP server, besides those of engines (engine/errors.py).

RequestError
├── ModelNotFound         404  no model of that name is served
├── RequestNotFound       404  the request that was asked about is unknown, or already forgotten
├── InvalidApiKey         401  no key, or one that is not known
├── NotPermitted          403  the API key does not permit this
├── BodyTooLarge          413  the HTTP body exceeds this server's limit
├── BodyTimeout           408  the HTTP body does not arrive in time
├── UnsupportedMediaType  415  the Content-Type is not JSON (for uploads: a form), or the body is compressed
└── PoisonRequest         422  two engines have ended with it, so it is refused for a while
"""

from __future__ import annotations

from engine.errors import RequestError


class ModelNotFound(RequestError):
    status, type = 404, "not_found_error"

    def __init__(self, model: str, known: list[str]):
        Exception.__init__(self, model, known)
        self.message, self.param = f"model {model!r} does not exist; this server has: {', '.join(known)}", "model"


class RequestNotFound(RequestError):
    status, type = 404, "not_found_error"

    def __init__(self, request_id: str):
        Exception.__init__(self, request_id)
        self.message, self.param = f"request {request_id!r} is unknown; only the newest requests are remembered", None


class InvalidApiKey(RequestError):
    status, type = 401, "authentication_error"


class NotPermitted(RequestError):
    status, type = 403, "permission_error"


class BodyTooLarge(RequestError):
    status = 413

    def __init__(self, limit: int):
        Exception.__init__(self, limit)
        self.message, self.param = f"the body is larger than {limit} bytes, the limit of this server", None


class BodyTimeout(RequestError):
    """The HTTP body did not arrive within this server's limit; the connection is closed."""

    status, type = 408, "timeout_error"

    def __init__(self, limit_s: float):
        Exception.__init__(self, limit_s)
        self.message, self.param = f"the body did not arrive within {limit_s:g} s, the limit of this server", None


class UnsupportedMediaType(RequestError):
    """The Content-Type is not JSON, or the body is compressed: a few compressed bytes can expand to any size. Requiring
    JSON also keeps web pages of other origins from sending requests."""

    status = 415

    def __init__(self, value: str | None, expected: str = "application/json", header: str = "Content-Type"):
        Exception.__init__(self, value, expected, header)
        self.message, self.param = f"{header} must be {expected}, got {value!r}", None
        self.header = header


class PoisonRequest(RequestError):
    """Two engines in succession ended by themselves while they read, compiled or computed this."""

    status = 422

    def __init__(self, what: str, refused_s: float):
        """what: what the engines worked on. refused_s: seconds for which it is still refused."""
        Exception.__init__(self, what, refused_s)
        self.message, self.param = (
            f"two engines have ended while they {what}; it is refused for the next {refused_s:.0f} s",
            None,
        )

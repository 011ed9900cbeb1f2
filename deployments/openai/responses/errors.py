"""Errors of stored responses, beside those of engine/errors.py."""

from __future__ import annotations

from engine.errors import RequestError, ServingError


class ResponseNotFound(RequestError):
    """No response of this id is stored, or it is stored where this ingress cannot look."""

    status, type = 404, "not_found_error"

    def __init__(self, response_id: str, ttl_s: float, shared: bool):
        """shared: all ingresses have one store."""
        Exception.__init__(self, response_id, ttl_s, shared)
        where = f"responses are stored for {ttl_s:g} s"
        if not shared:
            where = (
                f"each ingress keeps its own in memory for at most {ttl_s:g} s, and it may have been another one, or "
                "this one before it was started again; with a Redis as ingress.response_store all find them"
            )
        self.message, self.param = f"there is no response {response_id[:100]!r} here: {where}", "response_id"


class StoreUnavailable(ServingError):
    """The store of responses does not answer, or has no room."""

    status, type, retryable = 503, "service_unavailable_error", True

    def __init__(self, reason: str):
        super().__init__(reason)

    def __str__(self) -> str:
        return f"the store of responses cannot be used: {self.args[0]}"

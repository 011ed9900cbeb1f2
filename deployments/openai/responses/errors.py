"""Errors of stored responses, besides those of engine/errors.py."""

from __future__ import annotations

from engine.errors import RequestError


class ResponseNotFound(RequestError):
    """No response with this id is stored, or this ingress cannot access its store."""

    status, type = 404, "not_found_error"

    def __init__(self, response_id: str, ttl_s: float, shared: bool):
        """shared: whether all ingresses share one store."""
        Exception.__init__(self, response_id, ttl_s, shared)
        where = f"responses are stored for {ttl_s:g} s"
        if not shared:
            where = (
                f"each ingress keeps its own in memory for at most {ttl_s:g} s, and it may have been another one, or "
                "this one before it was started again; with ingress.store all find them"
            )
        self.message, self.param = f"there is no response {response_id[:100]!r} here: {where}", "response_id"

"""Errors of stored responses, in addition to those of engine/errors.py."""

from __future__ import annotations

from engine.errors import RequestError


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
                "this one before it was started again; with ingress.store all find them"
            )
        self.message, self.param = f"there is no response {response_id[:100]!r} here: {where}", "response_id"

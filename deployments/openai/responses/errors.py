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
                f"each ingress keeps only its own responses, in memory, for at most {ttl_s:g} s; another ingress may "
                "have it, or this one may have restarted (with ingress.store, all ingresses find all responses)"
            )
        self.message, self.param = f"there is no response {response_id[:100]!r}: {where}", "response_id"

"""Errors of sessions."""

from __future__ import annotations

from engine.errors import RequestError, ServingError


class SessionNotFound(RequestError):
    """The API key has no session of this name, or it has ended."""

    status, type = 404, "not_found_error"

    def __init__(self, name: str, ttl_s: float, shared: bool):
        """ttl_s: seconds after its last request when a session ends. shared: whether all ingresses share one store."""
        Exception.__init__(self, name, ttl_s, shared)
        where = "" if shared else "; without ingress.store, each ingress has only what it has answered itself"
        self.message, self.param = (
            f"this API key has no session {name[:100]!r}: it ends {ttl_s / 3600:g} hours after its last request{where}",
            "session_id",
        )


class SessionBudgetSpent(ServingError):
    """A budget of the session, or of one above it, has less left than the prompt takes and one token more. Nothing was
    started. Trying again does not help, but a higher budget does."""

    status, type = 402, "insufficient_quota"

    def __init__(self, session: str, header: str, value: float, left: float, need: float):
        """header: which budget. need: what the request takes at least; 0 if that is not known."""
        super().__init__(session, header, value, left, need)
        self.param = header

    def __str__(self) -> str:
        session, header, value, left, need = self.args
        what = f"session {session!r} has {left:.15g} left of its {header} of {value:.15g}"
        return f"{what}, and this request takes at least {need:.15g}" if need else what

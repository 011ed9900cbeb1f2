"""Errors of jobs, besides those of engine/errors.py."""

from __future__ import annotations

from engine.errors import RequestError, ServingError


class IdempotencyKeyReused(RequestError):
    """Raised when the key belongs to another request (draft-ietf-httpapi-idempotency-key-header, 2.7)."""

    status = 422

    def __init__(self) -> None:
        message = "this Idempotency-Key was used with another route or body; a new request needs a new key"
        super().__init__(message, "Idempotency-Key")


class IdempotencyKeyInUse(Exception):
    """Another ingress has just begun the same request. Clients never see this error."""


class StreamNotFound(RequestError):
    """Raised when no answer with this id is stored, or this ingress cannot access its store."""

    status, type = 404, "not_found_error"

    def __init__(self, stream_id: str, ttl_s: float, shared: bool):
        Exception.__init__(self, stream_id, ttl_s, shared)
        where = (
            ""
            if shared
            else " in the memory of each ingress (with ingress.store, all ingresses find them, even after a restart)"
        )
        self.message = f"there is no stream {stream_id[:100]!r}: answers are stored for {ttl_s:g} s{where}"
        self.param = "stream_id"


class AnswerNotReproducible(RequestError):
    """The rest of an answer cannot be computed, because the server has changed since it was begun."""

    status = 409

    def __init__(self, began: str | None, serves: str | None):
        Exception.__init__(self, began, serves)
        self.message = (
            f"this answer was begun with system_fingerprint {began}, and the server now has {serves}: send the request "
            "again with a new Idempotency-Key"
        )


class AnswerDiverged(RequestError):
    """The answer differs from the part that its client already has, or claims to have."""

    status = 409

    def __init__(self, index: int, tokens: int):
        Exception.__init__(self, index, tokens)
        self.message = (
            f"choice {index} of this answer differs from the first {tokens} tokens that Last-Event-ID stands for: they "
            "were computed again with another result, or the id is not from this stream; begin the stream from its "
            "start, or send the request again with a new Idempotency-Key"
        )
        self.param = "Last-Event-ID"


class LeaseLost(ServingError):
    """Another ingress has taken over the answer, because this one was silent for too long."""

    status, type, retryable = 503, "service_unavailable_error", True

    def __str__(self) -> str:
        return "another server continues this answer; send the request again, with the same Idempotency-Key"

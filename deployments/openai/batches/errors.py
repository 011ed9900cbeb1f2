"""Errors of files and batches, besides those of engine/errors.py."""

from __future__ import annotations

from engine.errors import RequestError, ServingError


class ObjectNotFound(RequestError):
    """No file or batch has this id. It may have expired, or belong to another API key."""

    status, type = 404, "not_found_error"

    def __init__(self, object_id: str):
        Exception.__init__(self, object_id)
        self.message, self.param = f"there is no {object_id[:100]!r}", "id"


class NotConfigured(RequestError):
    """The configuration turns off the requested feature."""

    status, type = 404, "not_found_error"

    def __init__(self, what: str, key: str):
        Exception.__init__(self, what, key)
        self.message, self.param = f"this server has no {what}; {key} in its configuration turns them on", None


class Conflict(RequestError):
    """The state of an object does not allow the request."""

    status = 409


class StorageError(ServingError):
    """A file cannot be stored or read. The server's log names its path."""

    status, type = 507, "service_unavailable_error"

    def __init__(self, reason: str):
        super().__init__(reason)

    def __str__(self) -> str:
        return f"this server cannot store or read files: {self.args[0]}"

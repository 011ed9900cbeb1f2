"""Who asks, and how long they are willing to wait."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from deployments.openai.protocol import GenerationBody
from engine.errors import InvalidParameter

TIMEOUT_HEADER = "x-request-timeout-ms"


@dataclass(frozen=True, slots=True)
class Caller:
    """client: whose fair share a request counts to. timeout_s: None leaves the limit to the server."""

    client: str
    timeout_s: float | None = None

    @classmethod
    def of(cls, request: Request, body: GenerationBody) -> Caller:
        """The API key's name; without keys, what the body says of its user; else the client's address.

        With keys the body's word does not count, or one client could take the shares of many.
        Raises InvalidParameter for a bad timeout.
        """
        name: str | None = getattr(request.state, "api_key_name", None)
        if name is not None:
            client = f"key:{name}"
        elif user := body.user or body.safety_identifier:
            client = f"user:{user}"
        else:
            client = f"address:{request.client.host if request.client else ''}"
        return cls(client, _timeout_s(request.headers.get(TIMEOUT_HEADER)))


def _timeout_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 16 and int(header) > 0):
        raise InvalidParameter(TIMEOUT_HEADER, header, "a whole number of milliseconds above 0")
    return int(header) / 1000

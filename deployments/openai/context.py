"""Who asks, and how long they are willing to wait."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from deployments.openai.requests import GenerationBody
from engine.errors import InvalidParameter

TIMEOUT_HEADER = "x-request-timeout-ms"
SESSION_HEADER = "x-session-id"  # as Serve's HAProxy, which then also chooses the same ingress
MAX_SESSION_ID = 256


@dataclass(frozen=True, slots=True)
class RequestContext:
    """client: whose fair share a request counts to. timeout_s: None leaves the limit to the server. session_id: of
    requests that should meet in one engine, where what they have in common is cached; empty for none."""

    client: str
    timeout_s: float | None = None
    session_id: str = ""

    @classmethod
    def of(cls, request: Request, body: GenerationBody) -> RequestContext:
        """The API key's name; without keys, what the body says of its user; else the client's address.

        With keys the body's word does not count, or one client could take the shares of many.
        Raises InvalidParameter for a bad timeout or session id.
        """
        name: str | None = getattr(request.state, "api_key_name", None)
        if name is not None:
            client = f"key:{name}"
        elif user := body.user or body.safety_identifier:
            client = f"user:{user}"
        else:
            client = f"address:{request.client.host if request.client else ''}"
        session_id = _session_id(request.headers.get(SESSION_HEADER, ""))
        return cls(client, _timeout_s(request.headers.get(TIMEOUT_HEADER)), session_id)


def _session_id(header: str) -> str:
    if len(header) > MAX_SESSION_ID or not (header.isascii() and header.isprintable()):
        raise InvalidParameter(SESSION_HEADER, header, f"at most {MAX_SESSION_ID} printable ASCII characters")
    return header


def _timeout_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 16 and int(header) > 0):
        raise InvalidParameter(TIMEOUT_HEADER, header, "a whole number of milliseconds above 0")
    return int(header) / 1000

"""The session of a request: its own id, or the one by which a well-known client names its conversation."""

from __future__ import annotations

import re

import msgspec
from starlette.datastructures import Headers

from engine.errors import InvalidParameter

SESSION_HEADER = "x-session-id"  # by this header, Serve's HAProxy also sends a session to one ingress
CLIENT_HEADERS = ("x-claude-code-session-id", "session-id", "session_id")
"""Headers of Claude Code 2.1, of Codex 0.169, and of Codex before."""
MAX_SESSION_ID = 256
IN_USER_ID = re.compile(r"_session_([0-9a-f-]{36})$")


class UserId(msgspec.Struct):
    """The user id that Claude Code sends, as JSON. Before 2.1 the session was its last part."""

    session_id: str = ""


USER_ID = msgspec.json.Decoder(UserId)


def session_of(headers: Headers, session_id: str | None, user: str | None) -> str:
    """Return the session of a request; empty for none. X-Session-Id comes first, then the body's `session_id`, then
    what clients send on their own. Raises InvalidParameter for a bad id in one of the first two.

    user: the body's user, in which Anthropic's clients name their session, too.
    """
    for field, given in ((SESSION_HEADER, headers.get(SESSION_HEADER)), ("session_id", session_id)):
        if given:
            check_id(field, given, MAX_SESSION_ID)
            return given
    found = [headers.get(name, "") for name in CLIENT_HEADERS]
    return next((each for each in [*found, _in_user_id(user or "")] if each and _is_id(each, MAX_SESSION_ID)), "")


def check_id(field: str, value: str, max_length: int) -> None:
    """Raise InvalidParameter for an id that is too long, or that could not stand in a header."""
    if not _is_id(value, max_length):
        raise InvalidParameter(field, value, f"at most {max_length} printable ASCII characters")


def _is_id(value: str, max_length: int) -> bool:
    return len(value) <= max_length and value.isascii() and value.isprintable()


def _in_user_id(user: str) -> str:
    if match := IN_USER_ID.search(user):
        return match[1]
    try:
        return USER_ID.decode(user).session_id if user.startswith("{") else ""
    except msgspec.MsgspecError:
        return ""

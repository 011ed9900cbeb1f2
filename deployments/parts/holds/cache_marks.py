"""Places up to which a prompt is to stay cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidParameter

MAX_MARKS = 4
SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}


@dataclass(frozen=True, slots=True)
class CacheMark:
    """Asks that a prompt stays cached up to a part of a message, or up to a tool."""

    ttl_s: float
    message: int = -1
    """Index of the message; -1 for a tool."""
    part: int = 0
    """Index of the part, or of the tool."""


def check_marks(marks: Sequence[CacheMark], field: str) -> None:
    if len(marks) > MAX_MARKS:
        raise InvalidParameter(field, len(marks), f"at most {MAX_MARKS} in a request")

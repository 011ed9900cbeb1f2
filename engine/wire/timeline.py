"""Timeline of a request, as `manta explain` shows it."""

from __future__ import annotations

import time

import msgspec


class TimelineEvent(msgspec.Struct, frozen=True):
    """One event in the life of a request. Never contains its text or tokens."""

    at: float
    """Seconds since 1970, by the clock of the machine it happened on."""
    where: str
    """Ingress or engine in which it happened; empty for an engine's own events until they reach the ingress."""
    what: str

    @classmethod
    def now(cls, what: str, where: str = "") -> TimelineEvent:
        return cls(time.time(), where, what)

"""One line of what happened to a request, as `manta explain` shows it."""

from __future__ import annotations

import time

import msgspec


class TimelineEvent(msgspec.Struct, frozen=True):
    """Something that happened to a request. Never holds its text or tokens."""

    at: float
    """Seconds since 1970, by the clock of the machine it happened on."""
    where: str
    """The ingress or engine it happened in; empty until the ingress gets it from the engine itself."""
    what: str

    @classmethod
    def now(cls, what: str, where: str = "") -> TimelineEvent:
        return cls(time.time(), where, what)

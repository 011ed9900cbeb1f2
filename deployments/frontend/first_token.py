"""When the client of an HTTP request wants its first token, and by when it probably comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from deployments.frontend.latency_bound import COVERAGE
from engine.errors import Overloaded

LIMIT_HEADER = "x-slo-ttft-ms"  # llm-d's name
BOUND_HEADER = "x-slo-ttft-bound-ms"


@dataclass(slots=True)
class FirstTokenDeadline:
    """What one HTTP request asks for, and what it was told. Seconds count from its arrival."""

    limit_s: float = math.inf
    bound_s: float = math.inf
    """Set by admission: time within which the first token probably comes; infinite while unknown."""
    asked_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def left_s(self, now: float) -> float:
        """Return the seconds until the limit. now: on the clock of the event loop."""
        return self.limit_s - (now - self.asked_at)

    def wanted_s(self) -> float | None:
        """Return the seconds from now until the limit; None without one."""
        return None if math.isinf(self.limit_s) else self.left_s(asyncio.get_running_loop().time())


_current: ContextVar[FirstTokenDeadline | None] = ContextVar("first_token_deadline", default=None)


def current_deadline() -> FirstTokenDeadline:
    """Return the deadline of the HTTP request on which the current task works; one without a limit by default."""
    return _current.get() or FirstTokenDeadline()


@contextmanager
def current(deadline: FirstTokenDeadline) -> Iterator[None]:
    """Make this the deadline of the current task."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


class FirstTokenLate(Overloaded):
    """The first token would probably come too late. Nothing was started for this request."""

    def __init__(self, limit_s: float, bound_s: float, param: str | None, retry_after_s: float):
        """param: header that sets the limit; None if the time limit of the whole request does."""
        what = f"the first token must come within {1000 * limit_s:.0f} ms"
        why = f"{COVERAGE:.0%} of the requests with this load get it within {1000 * bound_s:.0f} ms"
        super().__init__(f"{what}, but only {why}", retry_after_s)
        self.args = (limit_s, bound_s, param, retry_after_s)
        self.limit_s, self.bound_s, self.param = limit_s, bound_s, param

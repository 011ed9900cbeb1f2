"""Errors of requests that a limit of their API key refuses."""

from __future__ import annotations

from engine.errors import Overloaded


class QuotaExceeded(Overloaded):
    """A limit of the API key is used up. `limit` is its field, with the time in which it is counted."""

    type = "rate_limit_error"

    def __init__(self, key: str, limit: str, value: float, retry_after_s: float, budget: bool = False):
        """budget: whether it limits costs, so that clients need not try again soon."""
        what = f"API key {key!r} has used up its {limit} of {value:g}"
        when = f"in {retry_after_s:.0f} s at the latest" if "/" in limit else "when one of its requests ends"
        super().__init__(f"{what}; it is free again {when}", retry_after_s)
        self.args = (key, limit, value, retry_after_s, budget)
        self.key, self.limit, self.value, self.budget = key, limit, value, budget
        self.param = limit

    @property
    def code(self) -> str:
        return "insufficient_quota" if self.budget else "rate_limit_exceeded"

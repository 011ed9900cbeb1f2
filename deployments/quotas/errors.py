"""Errors of requests that a limit of their API key refuses or ends."""

from __future__ import annotations

from deployments.quotas.limits import Shortage
from engine.errors import Overloaded, RequestError, ServingError


class QuotaExceeded(Overloaded):
    """A limit of the API key has less left than the request would take. `limit` is its field, with the time in which it
    is counted."""

    type = "rate_limit_error"

    def __init__(self, key: str, shortage: Shortage, retry_after_s: float):
        limit, left = shortage.limit, int(shortage.left)
        what = f"its {limit.name} of {limit.value:.15g}"
        if shortage.is_part:
            what = f"this ingress's part of {what} (the store does not answer)"
        if left:
            what = f"has only {left} left of {what}, and this request would take {shortage.need:.0f}"
        else:
            what = f"has used up {what}"
        when = f"in {retry_after_s:.0f} s at the latest" if limit.duration else "when one of its requests ends"
        super().__init__(f"API key {key!r} {what}; more is free {when}", retry_after_s)
        self.args = (key, shortage, retry_after_s)
        self.key, self.limit, self.param = key, limit.name, limit.name
        self.budget = limit.is_cost
        """Whether it limits costs, so that clients need not try again soon."""

    @property
    def code(self) -> str:
        return "insufficient_quota" if self.budget else "rate_limit_exceeded"


class PromptExceedsLimit(RequestError):
    """A prompt has more tokens than its API key may use in any minute, so waiting would not help."""

    def __init__(self, key: str, limit: str, value: float, tokens: int):
        Exception.__init__(self, key, limit, value, tokens)
        self.message = f"the prompt has {tokens} tokens, but API key {key!r} has a {limit} of {value:.15g}"
        self.param = limit


class BudgetSpent(ServingError):
    """A budget of the API key was used up while the request ran, and the key's requests end then. Like QuotaExceeded,
    but trying again would cost the same again."""

    status, type = 402, "insufficient_quota"

    def __init__(self, key: str, limit: str, value: float):
        super().__init__(key, limit, value)
        self.param = limit

    def __str__(self) -> str:
        key, limit, value = self.args
        return f"API key {key!r} has used up its {limit} of {value:.15g}, and ends_running_requests is true for it"

    @property
    def code(self) -> str:
        return "insufficient_quota"

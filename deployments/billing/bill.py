"""What requests have used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Used:
    """What a request has used so far, or in the end."""

    started: bool
    """Whether it was admitted."""
    prompt_tokens: int
    output_tokens: int
    engine_seconds: float
    money: float
    cached_tokens: int = 0
    """Tokens of prompts that were cached."""


class Bill:
    """What one HTTP request has used. Engines report what aborted sequences have cost only after the request has
    ended."""

    def __init__(self, used: Callable[[], Used], when_known: Callable[[Callable[[], None]], None]):
        """used: returns what is known so far. when_known: calls a function once no engine will report another cost,
        maybe at once. The request must have ended."""
        self.used, self.when_known = used, when_known
        self.total: Used | None = None
        """What the request has used in all, once that is known."""

    def close(self, *, complete: bool) -> None:
        """Keep what is known, which is all if `complete`, and drop the request, so that its images leave memory."""
        known = self.used()
        self.used = lambda: known
        self.total = known if complete else None


def cost_headers(bills: Sequence[Bill]) -> dict[str, str]:
    """Return the headers that tell what an HTTP request has cost; none if that is not known yet."""
    totals = [bill.total for bill in bills if bill.total is not None]
    if not totals or len(totals) < len(bills):
        return {}
    headers = {"x-manta-compute-seconds": f"{sum(used.engine_seconds for used in totals):.9g}"}
    if money := sum(used.money for used in totals):
        headers["x-litellm-response-cost"] = f"{money:.9g}"  # by this name, LiteLLM and others count what it costs
    return headers

"""What keys have used of models and adapters in each hour."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec

from deployments.billing.totals import OTHERS, UsageTotals
from engine.clock import SYSTEM_CLOCK


class UsageLine(msgspec.Struct, frozen=True):
    """What is summed together."""

    hour: datetime
    """Its start, in UTC."""
    key: str
    model: str
    adapter: str

    @property
    def day(self) -> datetime:
        return self.hour.replace(hour=0)


class HourlyUsage:
    """Sums of one ingress, of today and yesterday: reports go back for a day, and a clock may be set back."""

    def __init__(self, wall: Callable[[], float] = SYSTEM_CLOCK.wall):
        """wall: returns seconds since 1970."""
        self._wall = wall
        self.lines: dict[UsageLine, UsageTotals] = {}

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)

    def add(self, key: str, model: str, adapter: str | None, used: UsageTotals) -> None:
        """Count what has ended now."""
        line = UsageLine(self.now.replace(minute=0, second=0, microsecond=0), key, model, adapter or "")
        if line not in self.lines:
            before = line.day - timedelta(days=1)
            self.lines = {line: used for line, used in self.lines.items() if line.hour >= before}
        self.lines.setdefault(line, UsageTotals()).add(used)

    def newest(self, since: datetime, count: int) -> list[tuple[UsageLine, UsageTotals]]:
        """Return the lines that began at `since` or later. Only the `count` with the most engine seconds are told
        apart; the others are added up for each hour and model."""
        lines = [(line, used) for line, used in self.lines.items() if line.hour >= since]
        lines.sort(key=lambda entry: -entry[1].compute_s)
        others: dict[UsageLine, UsageTotals] = {}
        for line, used in lines[count:]:
            together = UsageLine(line.hour, OTHERS, line.model, OTHERS)
            others.setdefault(together, UsageTotals()).add(used)
        return [*lines[:count], *others.items()]

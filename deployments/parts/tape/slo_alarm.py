"""Tells when first tokens begin to be late, so that replicas can keep what they know of that time. Pure: no clock."""

from __future__ import annotations

from collections import deque

NEWEST = 100  # requests that are looked at
LATE, WELL = 10, 5  # of them: late ones from which there is an alarm, and down to which they must fall before the next
PAUSE_S = 600.0  # between two alarms, at least


class SloAlarm:
    def __init__(self, target_s: float):
        self._target_s = target_s
        self._late: deque[bool] = deque(maxlen=NEWEST)
        self._is_on, self._next_at = False, 0.0

    def observe(self, first_token_s: float, now: float) -> str:
        """Record the time to a request's first token. Returns what is wrong if that has just begun, else nothing."""
        self._late.append(first_token_s > self._target_s)
        late = sum(self._late)
        if late <= WELL:
            self._is_on = False
        if self._is_on or late <= LATE or now < self._next_at:
            return ""
        self._is_on, self._next_at = True, now + PAUSE_S
        return f"{late} of the newest {len(self._late)} first tokens came after more than {self._target_s:g} s"

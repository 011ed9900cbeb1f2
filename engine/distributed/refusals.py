"""Counts the messages and peers that this process's sockets refuse. They are dropped; no receiving loop ends because of
them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Literal

logger = logging.getLogger(__name__)

LOG_PERIOD_S = 60.0  # at most one line per socket in this time

# malformed: a message that cannot be decoded. unexpected: one that can, but makes no sense here. unauthenticated: a
# peer without the cluster's key, from which nothing is read.
Reason = Literal["malformed", "unexpected", "unauthenticated"]

Counts = dict[str, dict[str, int]]
"""Number of refused messages and peers, by socket, then by Reason."""


class Refusals:
    """Counts since the start of the process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}
        self._quiet_until: dict[str, float] = {}  # by socket

    def add(self, socket: str, reason: Reason, detail: object) -> None:
        """Count one refusal, and log it unless this socket has just logged another. socket: its name in metrics."""
        now = time.monotonic()
        with self._lock:
            reasons = self._counts.setdefault(socket, {})
            reasons[reason] = total = reasons.get(reason, 0) + 1
            quiet = now < self._quiet_until.get(socket, now)
            if not quiet:
                self._quiet_until[socket] = now + LOG_PERIOD_S
        if not quiet:
            logger.warning("refused socket=%s reason=%s total=%d: %s", socket, reason, total, detail)

    def counts(self) -> Counts:
        with self._lock:
            return {socket: dict(reasons) for socket, reasons in self._counts.items()}


REFUSALS = Refusals()
"""The refusals of this process. There is only one such object, since metrics are also per process."""


def add_up(*several: Counts) -> Counts:
    """Return the sums of the counts of several processes."""
    total: Counts = {}
    for counts in several:
        for socket, reasons in counts.items():
            sums = total.setdefault(socket, {})
            for reason, count in reasons.items():
                sums[reason] = sums.get(reason, 0) + count
    return total

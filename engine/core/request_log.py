"""What happened to the newest requests of one engine, line by line, for `manta explain`."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

MAX_REQUESTS = 1000
MAX_LINES = 200  # of one request; a request with more has been retried for very long


class RequestLog:
    """A ring of the newest requests, for all threads of an engine. A line never holds text or tokens of a request."""

    def __init__(self, clock: Callable[[], float] = time.time):
        """clock: seconds since 1970, so that the journals of several engines can be put together."""
        self._clock = clock
        self._lines: OrderedDict[str, list[tuple[float, str]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, request_id: str, line: str) -> None:
        with self._lock:
            lines = self._lines.setdefault(request_id, [])
            if len(lines) < MAX_LINES:
                lines.append((self._clock(), line))
            self._lines.move_to_end(request_id)
            while len(self._lines) > MAX_REQUESTS:
                self._lines.popitem(last=False)

    def of(self, request_ids: Iterable[str]) -> dict[str, list[tuple[float, str]]]:
        """Of each of these requests that is known: (seconds since 1970, what happened), oldest first."""
        with self._lock:
            return {name: list(self._lines[name]) for name in request_ids if name in self._lines}

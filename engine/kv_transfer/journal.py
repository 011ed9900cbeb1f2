"""What happened to the newest requests, line by line, for `manta explain`."""

from __future__ import annotations

from collections import OrderedDict

MAX_REQUESTS = 500
MAX_LINES = 200  # of one request; a request with more has been retried for very long


class Journal:
    """A ring of the newest requests. One thread at a time."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[tuple[float, str]]] = OrderedDict()

    def add(self, request_id: str, at: float, line: str) -> None:
        """at: seconds since 1970, so that the journals of several engines can be put together."""
        lines = self._lines.setdefault(request_id, [])
        if len(lines) < MAX_LINES:
            lines.append((at, line))
        self._lines.move_to_end(request_id)
        while len(self._lines) > MAX_REQUESTS:
            self._lines.popitem(last=False)

    def of(self, request_id: str) -> list[tuple[float, str]]:
        return list(self._lines.get(request_id, []))

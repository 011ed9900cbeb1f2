"""What sockets of this process have refused since a moment, for tests."""

from __future__ import annotations

import time

from engine.distributed.refusals import REFUSALS, Reason

LIMIT_S = 60.0


class Refused:
    """Counts from its construction on, as other tests of this process have counted before."""

    def __init__(self, socket: str, reason: Reason):
        self._socket, self._reason = socket, reason
        self._before = self._now()

    @property
    def count(self) -> int:
        return self._now() - self._before

    def wait_for(self, count: int) -> None:
        """Return once so many are counted; what is sent is heard in another thread."""
        deadline = time.monotonic() + LIMIT_S
        while self.count < count:
            assert time.monotonic() < deadline, f"{self.count} of {count}"
            time.sleep(0.002)

    def _now(self) -> int:
        return REFUSALS.counts().get(self._socket, {}).get(self._reason, 0)

"""What the store has of the limits of one key: what the requests of each ingress have used. Pure Python: no clock."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

LEASE_S = 10.0
"""Seconds after which the requests of a silent ingress count as ended."""
CLOCKS_S = LEASE_S
"""Maximum difference between the clocks of ingresses that share a limit."""
KEEP_S = 3600.0
"""Seconds after which an ingress that has ended is no longer told apart from others that have ended."""
SLOTS = ("", " apart", " apart 2", " apart 3")
"""Ends of the names under which the windows of one limit are stored. So many are remembered."""
ENDED = ""  # the holder that stands for all those
DEBT = "debt"  # the holder that stands for what the windows before had too much
ALWAYS = 0.0  # start of the window of limits that are never used up


class Window(msgspec.Struct, array_like=True):
    """A time that is counted together."""

    start: float
    """Seconds since 1970."""
    used: dict[str, float]
    """By ingress. Of a limit that is never used up, what requests use now."""
    version: int = 0
    """Version of the record when an ingress whose clock is in this window wrote last."""

    def taken(self, without: str | None = None) -> float:
        """Return what all ingresses have used, but one."""
        return sum(used for holder, used in self.used.items() if holder != without)


class QuotaRecord(msgspec.Struct, array_like=True):
    """Windows of all limits of a key.

    Each ingress writes totals, and only its own, so writing twice changes nothing. A request is written before it
    begins, so at any time the totals say at least what was admitted, also by ingresses that are dead.
    """

    epoch: str
    """Tells records apart that began anew because the store had lost the values."""
    version: int = 0
    """Number of writes."""
    leases: dict[str, float] = {}
    """When each ingress will be considered dead unless it writes again, in seconds since 1970."""
    windows: dict[str, Window] = {}
    """By the name of the limit and one of SLOTS."""

    def encode(self) -> bytes:
        return _encode(self)

    def find(self, name: str, start: float) -> Window | None:
        """Return the window of a limit that begins at `start`."""
        return next((window for window in self._of(name) if window.start == start), None)

    def newest(self, name: str, until: float) -> Window | None:
        """Return the newest window of a limit that begins before `until`."""
        found = [window for window in self._of(name) if window.start <= until]
        return max(found, key=lambda window: window.start, default=None)

    def put(self, name: str, window: Window) -> None:
        """Store a new window of a limit, in place of the one that nobody has written for longest if all slots are full.
        Which one has ended, only clocks say, and one of them may be wrong."""
        keys = [name + slot for slot in SLOTS]
        free = next((key for key in keys if key not in self.windows), None)
        self.windows[free or min(keys, key=lambda key: self.windows[key].version)] = window

    def _of(self, name: str) -> list[Window]:
        return [self.windows[name + slot] for slot in SLOTS if name + slot in self.windows]

    def expire(self, now: float, alive: Set[str]) -> None:
        """Count the requests of dead ingresses as ended. A lease from a clock that is too far ahead is shortened.

        alive: ingresses that are not dead, whatever the clocks say.
        """
        for holder in self.leases.keys() - alive:
            self.leases[holder] = min(self.leases[holder], now + LEASE_S + CLOCKS_S)
        for holder in [holder for holder, until in self.leases.items() if until <= now and holder not in alive]:
            for window in self.windows.values():
                if window.start == ALWAYS:
                    window.used.pop(holder, None)
            if self.leases[holder] <= now - KEEP_S:
                self.forget(holder)

    def forget(self, holder: str) -> None:
        """Count what an ingress has used for ENDED."""
        self.leases.pop(holder, None)
        for window in self.windows.values():
            used = window.used.pop(holder, 0.0)
            if used and window.start != ALWAYS:
                window.used[ENDED] = window.used.get(ENDED, 0.0) + used

    def with_lost(self, seen: QuotaRecord) -> QuotaRecord:
        """Return this record with what the store has lost. seen: what the store had before."""
        if self.epoch == seen.epoch and self.version >= seen.version:
            return self
        for holder in _holders(seen.windows.values()) | seen.leases.keys():
            if holder in self.leases and self.leases[holder] >= seen.leases.get(holder, 0.0):
                continue
            if holder in seen.leases:
                self.leases[holder] = seen.leases[holder]
            for key, before in sorted(seen.windows.items(), key=lambda item: -item[1].version):
                name, used = key.partition(SLOTS[1])[0], before.used.get(holder)
                window = self.find(name, before.start)
                if window is None and len(self._of(name)) < len(SLOTS):  # else it was long ago
                    self.put(name, window := Window(before.start, {}, before.version))
                if window is not None and used is not None:
                    window.used[holder] = max(used, window.used.get(holder, 0.0)) if holder == ENDED else used
        self.version = max(self.version, seen.version)
        return self


def decode(value: bytes) -> QuotaRecord:
    """Raises msgspec.DecodeError."""
    return _decode(value)


def _holders(windows: Iterable[Window]) -> set[str]:
    return {holder for window in windows for holder in window.used}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QuotaRecord).decode

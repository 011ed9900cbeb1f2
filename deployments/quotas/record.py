"""What the store has of the limits of one key: what each ingress has spent and reserved. Pure Python: no clock."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

LEASE_S = 10.0
"""Seconds after which what a silent ingress has reserved counts as spent, and its requests as ended."""
CLOCKS_S = LEASE_S
"""Maximum difference between the clocks of ingresses that share a limit."""
KEEP_S = 3600.0
"""Seconds after which an ingress that has ended is no longer told apart from others that have ended."""
APART = " apart"
ENDED = ""  # the holder that stands for all those
DEBT = "debt"  # the holder that stands for what the windows before had too much
ALWAYS = 0.0  # start of the window of limits that are never used up


class Share(msgspec.Struct, array_like=True):
    """One ingress's part of a limit."""

    spent: float
    """What its requests have used. Of a limit that is never used up, what they use now."""
    reserved: float
    """What it may use more without asking."""


class Window(msgspec.Struct, array_like=True):
    """A time that is counted together."""

    start: float
    """Seconds since 1970."""
    shares: dict[str, Share]
    """By ingress."""

    def taken(self, without: str) -> float:
        """Return what all ingresses but one have spent and reserved."""
        return sum(share.spent + share.reserved for holder, share in self.shares.items() if holder != without)


class QuotaRecord(msgspec.Struct, array_like=True):
    """Windows of all limits of a key.

    Each ingress writes its own shares only, with totals, so writing twice changes nothing. What an ingress has not
    reserved is not spent: so at any time the shares say at least what has been spent, also by ingresses that are dead.
    """

    epoch: str
    """Tells records apart that began anew because the store had lost the values."""
    version: int = 0
    """Number of writes."""
    leases: dict[str, float] = {}
    """When each ingress will be considered dead unless it writes again, in seconds since 1970."""
    windows: dict[str, Window] = {}
    """By the name of the limit. If clocks differ too much, there is another window under this name with APART."""

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
        """Store a new window of a limit in place of the one before it, which has ended."""
        old = self.newest(name, window.start)
        keys = [key for key in (name, name + APART) if self.windows.get(key) is old]
        self.windows[keys[0] if keys else name + APART] = window

    def _of(self, name: str) -> list[Window]:
        return [self.windows[key] for key in (name, name + APART) if key in self.windows]

    def expire(self, now: float) -> None:
        """Count what dead ingresses had reserved as spent, for they may have spent it. An ingress that was only silent
        will correct that. A lease from a clock that is too far ahead is shortened."""
        for holder, until in self.leases.items():
            self.leases[holder] = min(until, now + LEASE_S + CLOCKS_S)
        for holder in [holder for holder, until in self.leases.items() if until <= now]:
            for window in self.windows.values():
                share = window.shares.get(holder)
                if share is None:
                    continue
                if window.start == ALWAYS:
                    del window.shares[holder]
                else:
                    share.spent, share.reserved = share.spent + share.reserved, 0.0
            if self.leases[holder] <= now - KEEP_S:
                self.forget(holder)

    def forget(self, holder: str) -> None:
        """Count what an ingress has spent and reserved for ENDED."""
        self.leases.pop(holder, None)
        for window in self.windows.values():
            share = window.shares.pop(holder, None)
            if share is not None and window.start != ALWAYS and (spent := share.spent + share.reserved):
                window.shares.setdefault(ENDED, Share(0.0, 0.0)).spent += spent

    def num_live(self, now: float, without: str) -> int:
        """Return how many other ingresses use the key."""
        return sum(until > now for holder, until in self.leases.items() if holder != without)

    def with_lost(self, seen: QuotaRecord) -> QuotaRecord:
        """Return this record with what the store has lost. seen: what the store had before."""
        if self.epoch == seen.epoch and self.version >= seen.version:
            return self
        for holder in _holders(seen.windows.values()) | seen.leases.keys():
            if holder in self.leases and self.leases[holder] >= seen.leases.get(holder, 0.0):
                continue
            if holder in seen.leases:
                self.leases[holder] = seen.leases[holder]
            for name, before in seen.windows.items():
                window = self.windows.setdefault(name, Window(before.start, {}))
                share = before.shares.get(holder)
                if share is None or window.start > before.start:
                    continue
                if window.start < before.start:
                    self.windows[name] = window = Window(before.start, {})
                known = window.shares.get(holder)
                if holder != ENDED or known is None or known.spent < share.spent:
                    window.shares[holder] = share
        self.version = max(self.version, seen.version)
        return self


def decode(value: bytes) -> QuotaRecord:
    """Raises msgspec.DecodeError."""
    return _decode(value)


def _holders(windows: Iterable[Window]) -> set[str]:
    return {holder for window in windows for holder in window.shares}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QuotaRecord).decode

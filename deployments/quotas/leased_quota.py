"""One ingress's part of the limits of one key. Pure Python: no clock, no store.

The ingress reserves a part of each limit in the store, and spends from that without asking. Now and then it writes what
it has spent, takes as much again as it will soon need, and gives back the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deployments.quotas.limits import Limit, Unit
from deployments.quotas.record import ALWAYS, CLOCKS_S, DEBT, LEASE_S, QuotaRecord, Share, Window, decode

AHEAD_S = 1.5
"""Seconds for which an ingress reserves what it has recently needed."""
IDLE_S = 5.0
"""Seconds without a request after which an ingress reserves nothing."""
PAUSE_S = 0.25
"""Seconds after which an ingress asks again for what it did not get."""
PLACE_PAUSE_S = 0.05
"""The same for a place, which may be free again at any time."""
PLACE_WAIT_S = 1.25
"""Seconds for which a request waits for places that other ingresses have: longer than RENEW_S, after which all that
have come free there are known."""
AHEAD_PARTS, PLACE_PARTS = 8, 2
"""All ingresses together reserve ahead at most one of so many parts of what is left. So the less is left, the less is
reserved where nobody needs it. Of places it may be more, since requests hold them for long."""
LEAST = 1e-9  # of a cost: what a request needs of which nothing is known

Needs = Mapping[Unit, float]


@dataclass(slots=True)
class Charge:
    """What one request was charged with, by the name of the limit."""

    amounts: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    """Windows in which that was."""


@dataclass(slots=True)
class Tally:
    """This ingress's part of one limit, in the present window."""

    start: float
    end: float
    free: float | None
    """What no ingress had spent or reserved when the store was asked the last time; None if it was never asked."""
    spent: float = 0.0
    reserve: float = 0.0
    """What it may spend without asking; negative if requests have cost more than expected."""
    wanted: float = 0.0
    """What waits for a reserve."""
    largest: float = 0.0
    """The most that one request of these needs."""
    used: float = 0.0
    """What was spent since the store was asked the last time."""
    recent: float = 0.0
    """What was recently spent in a second."""
    used_at: float = 0.0
    """When the store was told the last time that something was spent."""
    refused_until: float = 0.0
    others_have: float = 0.0
    """What other ingresses had spent or reserved when the store was asked the last time."""
    granted_alone: bool = False
    """Whether it has taken a part of `free` without the store."""
    written: Share = field(default_factory=lambda: Share(0.0, 0.0))

    def spend(self, amount: float) -> None:
        self.spent += amount
        self.reserve -= amount
        self.used += amount


class LeasedQuota:
    def __init__(self, holder: str, limits: Sequence[Limit], num_holders: int, now: float):
        """holder: name of this ingress. num_holders: number of ingresses. now: seconds since 1970, as everywhere."""
        self._holder, self._num_holders = holder, num_holders
        self._limits: dict[str, Limit] = {}
        self._known: dict[str, Limit] = {}  # with those that were removed; requests under way are still settled
        self._tallies: dict[str, Tally] = {}
        self._before: dict[str, Tally] = {}  # of the windows before these, since a clock may be set back
        self._in_flight = 0
        self._asked_at = now
        self._seen: bytes | None = None
        self._proposal: tuple[QuotaRecord, dict[str, float]] | None = None
        self.change(limits, now)

    def change(self, limits: Sequence[Limit], now: float) -> None:
        """Replace the limits. What has been spent stays spent."""
        before, self._limits = self._limits, {limit.name: limit for limit in limits}
        self._known |= self._limits
        for name, limit in self._limits.items():
            self._tallies.setdefault(name, Tally(*limit.window(now), free=None)).refused_until = 0.0
        for name in before.keys() - self._limits.keys():
            self._tallies[name].reserve = 0.0  # it may come back when the store has given that to others

    def take(self, needs: Needs, now: float) -> Charge | None:
        """Charge a request with what it probably needs. Returns None if the reserve is too small."""
        return None if self.short_of(needs, now) else self.charge(needs, now)

    def charge(self, needs: Needs, now: float) -> Charge:
        """Charge a request, also with more than is reserved."""
        self._roll(now)
        charge = Charge()
        for name, limit in self._limits.items():
            tally, amount = self._tallies[name], _need(limit, needs)
            tally.spend(amount)
            charge.amounts[name], charge.starts[name] = amount, tally.start
        self._in_flight += 1
        return charge

    def settle(self, charge: Charge, used: Needs, now: float) -> None:
        """Correct a charge by what the request has really used. Called once, when it has ended."""
        self._roll(now)
        self._in_flight -= 1
        for name, amount in charge.amounts.items():
            limit, tally = self._known[name], self._tallies[name]
            more = -amount if limit.duration is None else used.get(limit.unit, 0.0) - amount
            if tally.start == charge.starts[name] or more > 0:
                tally.spend(more)

    def raise_to(self, charge: Charge, used: Needs, now: float) -> None:
        """Raise a charge to what the request has really used so far, of the units in `used`."""
        self._roll(now)
        for name, amount in charge.amounts.items():
            more = used.get(self._known[name].unit, 0.0) - amount
            if more > 0:
                self._tallies[name].spend(more)
                charge.amounts[name] += more

    def short_of(self, needs: Needs, now: float) -> list[Limit]:
        """Return the limits of which the reserve is too small."""
        self._roll(now)
        return [
            limit
            for name, limit in self._limits.items()
            if (need := _need(limit, needs)) and self._tallies[name].reserve < need
        ]

    def refused(self, needs: Needs, now: float) -> Limit | None:
        """Return a limit of which there was not enough a moment ago."""
        for limit in self.short_of(needs, now):
            if 0 < self._tallies[limit.name].refused_until - now <= PAUSE_S:  # more if the clock was set back
                return limit
        return None

    def want(self, needs: Needs, sign: int = 1) -> None:
        """Ask the store for this too, the next time. sign: -1 once it is no longer needed."""
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            need = _need(limit, needs)
            wanted = tally.wanted + sign * need
            tally.wanted = wanted if wanted >= LEAST / 2 else 0.0  # sums of floats hardly ever come back to 0
            tally.largest = max(tally.largest, need) if tally.wanted else 0.0

    @property
    def place_wait_s(self) -> float:
        """Seconds for which a request should wait for a place before it is refused. Others may have free places, and
        have not written that yet."""
        if self._num_holders == 1:
            return 0.0
        return PLACE_WAIT_S if any(tally.others_have for tally in self._places()) else PAUSE_S

    @property
    def has_scarce_places(self) -> bool:
        """Whether this ingress has free places that others should get at once, since they can take few without it."""
        few = PLACE_PARTS * (self._num_holders - 1)
        return any(tally.reserve >= 1 and (tally.free or 0.0) < few for tally in self._places())

    def _places(self) -> list[Tally]:
        return [self._tallies[name] for name, limit in self._limits.items() if limit.duration is None]

    def is_unknown(self, limit: Limit) -> bool:
        """Return whether the store was never asked about a limit."""
        return self._tallies[limit.name].free is None

    def remaining(self, limit: Limit) -> float:
        """Return how much of a limit is left, as far as is known."""
        tally = self._tallies[limit.name]
        free = limit.value if tally.free is None else tally.free
        return min(limit.value, max(0.0, free + tally.reserve))

    def ends_at(self, limit: Limit) -> float:
        return self._tallies[limit.name].end

    @property
    def is_settled(self) -> bool:
        """Whether the store has everything, and nothing is reserved."""
        return not self._in_flight and all(
            tally.written == Share(tally.spent, 0.0) and not tally.wanted
            for tally in map(self._tallies.__getitem__, self._limits)
        )

    def go_alone(self, now: float) -> None:
        """Reserve this ingress's part of what is free, without the store, which does not answer. Does nothing if it has
        that already, or does not know what is free."""
        self._roll(now)
        for tally in self._tallies.values():
            if not tally.granted_alone and tally.free is not None:
                part = max(0.0, tally.free) / self._num_holders
                tally.granted_alone, tally.reserve, tally.free = True, tally.reserve + part, tally.free - part

    def propose(self, stored: bytes | None, now: float, leaving: bool = False) -> bytes:
        """Return what to write into the store in place of `stored`. Call `commit` if that was possible.

        leaving: whether to reserve nothing. Raises msgspec.DecodeError.
        """
        self._roll(now)
        record = self._record(stored, now)
        forgotten = self._seen is not None and self._holder not in record.leases
        if forgotten:
            self._forget_written()
            record.forget(self._holder)
        record.expire(now)
        num_live = 1 + record.num_live(now, self._holder)
        more: dict[str, float] = {}
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            newest = record.newest(name, now + CLOCKS_S)
            if newest is not None and newest.start > tally.start:  # this machine's clock is behind
                tally = self._begin(limit, newest.start)
            window = record.find(name, tally.start)
            if window is None:
                window = self._window(name, tally.start, forgotten)
                if debt := _debt(limit, record.newest(name, tally.start), tally.start):
                    window.shares[DEBT] = Share(debt, 0.0)
                record.put(name, window)
            if tally.used:
                tally.used_at = now
            left = max(0.0, limit.value - window.taken(self._holder) - tally.spent)
            if limit.is_cost and left:
                left = max(left, tally.largest)  # the last request may exceed a budget
            fair = left / ((AHEAD_PARTS if limit.duration else PLACE_PARTS) * num_live)
            wish = 0.0 if leaving else self._wish(tally, fair, now)
            reserved = min(left, math.floor(wish) if limit.is_whole else wish)
            # the rest must no longer be spent, even if the answer of the store is lost
            tally.reserve = min(tally.reserve, reserved)
            more[name] = reserved - tally.reserve
            window.shares[self._holder] = Share(tally.spent, reserved)
        record.leases[self._holder] = now + LEASE_S
        record.version += 1
        self._proposal = record, more
        return record.encode()

    def commit(self, now: float) -> None:
        """Use what the last proposal has reserved. The store has it now."""
        assert self._proposal is not None
        record, more = self._proposal
        self._proposal = None
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            window = record.find(name, tally.start)
            if name not in more or window is None:
                continue  # a new window, or a limit, that has come since
            share = window.shares[self._holder]
            tally.written, tally.granted_alone = share, False
            tally.others_have = window.taken(self._holder)
            tally.free = limit.value - tally.others_have - share.spent - share.reserved
            tally.reserve += more[name]
            decay = 0.5 ** max(0.0, now - self._asked_at)
            tally.recent, tally.used = max(tally.used, tally.recent * decay), 0.0
            if tally.wanted and tally.reserve < tally.wanted:
                tally.refused_until = min(tally.end, now + (PAUSE_S if limit.duration else PLACE_PAUSE_S))
        self._asked_at, self._seen = now, record.encode()

    def _record(self, stored: bytes | None, now: float) -> QuotaRecord:
        seen = None if self._seen is None else decode(self._seen)
        epoch = f"{self._holder}@{now}"
        if stored is None:
            new = QuotaRecord(epoch)
            return new if seen is None else new.with_lost(seen)
        record = decode(stored)
        return record if seen is None else record.with_lost(seen)

    def _window(self, name: str, start: float, forgotten: bool) -> Window:
        """Return a window that the store does not have. If an ingress whose clock is wrong has replaced it, it is the
        one that this ingress has written last. forgotten: whether another ingress has counted this one as ended."""
        seen = QuotaRecord("") if self._seen is None else decode(self._seen)
        if forgotten:
            seen.forget(self._holder)
        return seen.find(name, start) or Window(start, {})

    def _forget_written(self) -> None:
        """Start from nothing: after a long silence, what this ingress had written counts for ENDED. Its requests that
        still run are counted again."""
        for tally in self._tallies.values():
            if tally.start != ALWAYS:
                tally.spent -= tally.written.spent + tally.written.reserved
            tally.written = Share(0.0, 0.0)

    def _wish(self, tally: Tally, fair: float, now: float) -> float:
        """Return what to reserve: what is wanted now, and what will soon be needed unless that is unfair."""
        recent = (
            max(tally.used, tally.recent * 0.5 ** max(0.0, now - self._asked_at))
            if now < tally.used_at + IDLE_S
            else 0.0
        )
        return tally.wanted + min(AHEAD_S * max(0.0, recent), fair)

    def _roll(self, now: float) -> None:
        """Begin new windows. If the clock was set back, go on with those before, of which nothing is reserved then."""
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            if tally.start - CLOCKS_S <= now < tally.end:
                continue
            before, tally = self._before.get(name), self._begin(limit, now)
            if before is not None and before.start == tally.start:
                tally.spent, tally.reserve, tally.written = before.spent, min(0.0, before.reserve), before.written

    def _begin(self, limit: Limit, now: float) -> Tally:
        """Begin the window of a time, and return its tally."""
        old = self._before[limit.name] = self._tallies[limit.name]
        free = None if old.free is None else limit.value
        new = Tally(*limit.window(now), free, wanted=old.wanted, used=old.used, recent=old.recent, used_at=old.used_at)
        if limit.unit == "tokens" and new.start == old.end and old.reserve < 0:
            new.spend(-old.reserve)  # more than the store knows of
        self._tallies[limit.name] = new
        return new


def _debt(limit: Limit, before: Window | None, start: float) -> float:
    """Return how many tokens a new window begins with, because earlier ones had more than the limit. before: the newest
    of them."""
    if before is None or limit.unit != "tokens":
        return 0.0
    first, end = limit.window(before.start)
    passed = round((start - first) / (end - first))
    return max(0.0, sum(share.spent for share in before.shares.values()) - limit.value * passed)


def _need(limit: Limit, needs: Needs) -> float:
    """Return what a request is charged with at first."""
    need = needs.get(limit.unit)
    if need is None:
        return 0.0
    return max(need, LEAST) if limit.is_cost else need

"""One ingress's view of the limits of one key, which all ingresses count together. Pure Python: no clock, no store.

The counters are in the store. A request is added to them before it begins, by one write that succeeds only if nobody
else has written since they were read. What it has really used is corrected later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployments.quotas.limits import Limit, Shortage, Unit
from deployments.quotas.record import ALWAYS, CLOCKS_S, DEBT, LEASE_S, QuotaRecord, Window, decode

PAUSE_S = 0.25
"""Seconds after which an ingress asks again for what there was not."""
PLACE_PAUSE_S = 0.05
"""The same for a place, which may be free again at any time."""

Needs = Mapping[Unit, float]


@dataclass(slots=True)
class Charge:
    """What one request was charged with, by the name of the limit."""

    amounts: dict[str, float]
    starts: dict[str, float]
    """Windows in which that was."""


@dataclass(slots=True)
class Tally:
    """One limit in the present window."""

    start: float
    end: float
    others: float | None
    """What other ingresses had used when the store was asked the last time; None if it was never asked."""
    used: float = 0.0
    """What requests of this ingress have used, with what those that run are charged with."""
    written: float = 0.0
    """The same in the store."""
    most_alone: float | None = None
    """Up to which it may use the limit without the store; None while the store answers."""
    is_new: bool = True
    """Whether the store was never asked for it. If the clock was in this window before, this ingress has used some."""


@dataclass(slots=True)
class Proposal:
    """What to write, and what becomes of the requests that ask: what each is charged with, or a limit of which there is
    not enough."""

    record: QuotaRecord
    value: bytes
    outcomes: list[Charge | Shortage]


class SharedQuota:
    def __init__(self, holder: str, limits: Sequence[Limit], num_holders: int, now: float):
        """holder: name of this ingress. num_holders: number of ingresses. now: seconds since 1970, as everywhere."""
        self._holder, self._num_holders = holder, num_holders
        self._limits: dict[str, Limit] = {}
        self._known: dict[str, Limit] = {}  # with those that were removed; requests under way are still settled
        self._tallies: dict[str, Tally] = {}
        self._before: dict[str, Tally] = {}  # of the windows before these, since a clock may be set back
        self._in_flight = 0
        self._asked_at = 0.0
        self._seen: bytes | None = None
        self._seen_at = float("-inf")  # since the process began, as the next
        self._heard: dict[str, float] = {}  # when each other ingress has been seen to write
        self.change(limits, now)

    def change(self, limits: Sequence[Limit], now: float) -> None:
        """Replace the limits. What has been used stays used."""
        self._limits = {limit.name: limit for limit in limits}
        self._known |= self._limits
        for name, limit in self._limits.items():
            self._tallies.setdefault(name, Tally(*limit.window(now), others=None))
        self._asked_at = 0.0

    def charge(self, needs: Needs, now: float) -> Charge:
        """Charge a request, whatever is left."""
        self._roll(now)
        return self._apply(self._charge_of(needs))

    def _charge_of(self, needs: Needs) -> Charge:
        return Charge(
            {name: needs.get(limit.unit, 0.0) for name, limit in self._limits.items()},
            {name: self._tallies[name].start for name in self._limits},
        )

    def _apply(self, charge: Charge) -> Charge:
        for name, amount in charge.amounts.items():
            for tally in (self._tallies[name], self._before.get(name)):
                if tally is not None and tally.start == charge.starts[name]:
                    tally.used += amount
                    break
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
                tally.used += more

    def raise_to(self, charge: Charge, used: Needs, now: float) -> None:
        """Raise a charge to what the request has really used so far, of the units in `used`."""
        self._roll(now)
        for name, amount in charge.amounts.items():
            more = used.get(self._known[name].unit, 0.0) - amount
            if more > 0:
                self._tallies[name].used += more
                charge.amounts[name] += more

    def refused(self, needs: Needs, now: float) -> Shortage | None:
        """Return a limit of which there was not enough a moment ago."""
        self._roll(now)
        for name, limit in self._limits.items():
            tally, pause_s = self._tallies[name], PAUSE_S if limit.duration else PLACE_PAUSE_S
            is_new = 0 <= now - self._asked_at <= pause_s and tally.others is not None
            if is_new and (short := _shortage(limit, (tally.others or 0.0) + tally.used, needs)) is not None:
                return short
        return None

    def alone(self, needs: Needs, now: float) -> Charge | Shortage:
        """Charge a request without the store, which does not answer, if this ingress's part of what was left suffices;
        else return a limit of which it does not."""
        self._roll(now)
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            if tally.others is None:
                return Shortage(limit, 0.0, needs.get(limit.unit, 0.0), is_part=True)
            if tally.most_alone is None:
                left = max(0.0, limit.value - tally.others - tally.used)
                tally.most_alone = tally.used + left / self._num_holders
            if (short := _shortage(limit, tally.used, needs, tally.most_alone)) is not None:
                return short
        return self.charge(needs, now)

    @property
    def has_others(self) -> bool:
        return self._num_holders > 1

    @property
    def others_have_places(self) -> bool:
        """Whether requests of other ingresses had places when the store was asked the last time."""
        return any(self._tallies[name].others for name, limit in self._limits.items() if limit.duration is None)

    def is_unknown(self, limit: Limit) -> bool:
        """Return whether the store was never asked about a limit."""
        return self._tallies[limit.name].others is None

    def remaining(self, limit: Limit) -> float:
        """Return how much of a limit is left, as far as is known."""
        tally = self._tallies[limit.name]
        return min(limit.value, max(0.0, limit.value - (tally.others or 0.0) - tally.used))

    def ends_at(self, limit: Limit) -> float:
        return self._tallies[limit.name].end

    @property
    def is_settled(self) -> bool:
        """Whether no request runs, and the store has everything."""
        return not self._in_flight and all(
            tally.written == tally.used for tally in map(self._tallies.__getitem__, self._limits)
        )

    def propose(self, stored: bytes | None, now: float, up_s: float, asked: Sequence[Needs] = ()) -> Proposal:
        """Return what to write into the store in place of `stored`. Call `commit` if that was possible.

        up_s: seconds on a clock that nobody sets. asked: what requests need, in the order in which they get it. Raises
        msgspec.DecodeError.
        """
        self._roll(now)
        seen = None if self._seen is None else decode(self._seen)
        record = QuotaRecord(f"{self._holder}@{now}") if stored is None else decode(stored)
        if seen is not None:
            record = record.with_lost(seen)
            if self._holder not in record.leases:  # another ingress has counted this one as ended
                self._forget_written()
                record.forget(self._holder)
                seen.forget(self._holder)
        record.expire(now, self._alive(record, seen, up_s))
        record.version += 1
        windows = {name: self._window(limit, record, now, seen) for name, limit in self._limits.items()}
        for name, window in windows.items():
            window.used[self._holder], window.version = self._tallies[name].used, record.version
        outcomes: list[Charge | Shortage] = []
        for needs in asked:
            short = (_shortage(limit, windows[name].taken(), needs) for name, limit in self._limits.items())
            if (first := next(filter(None, short), None)) is not None:
                outcomes.append(first)
                continue
            charge = self._charge_of(needs)
            for name, amount in charge.amounts.items():
                windows[name].used[self._holder] += amount
            outcomes.append(charge)
        record.leases[self._holder] = now + LEASE_S
        return Proposal(record, record.encode(), outcomes)

    def commit(self, proposal: Proposal, now: float, up_s: float) -> list[Charge | Shortage]:
        """Use a proposal, which the store has now. Returns the charges of the requests that asked, or a limit of which
        there was not enough."""
        for name in self._limits:
            tally = self._tallies[name]
            window = proposal.record.find(name, tally.start)
            if window is not None and self._holder in window.used:  # else a new window, or a limit, that has come since
                tally.written, tally.most_alone = window.used[self._holder], None
                tally.others = window.taken(self._holder)
        self._asked_at, self._seen, self._seen_at = now, proposal.value, up_s
        return [outcome if isinstance(outcome, Shortage) else self._apply(outcome) for outcome in proposal.outcomes]

    def _alive(self, record: QuotaRecord, seen: QuotaRecord | None, up_s: float) -> set[str]:
        """Return the ingresses that have written within LEASE_S, as this one has seen itself. What leases say, depends
        on clocks. seen: the record before, if there is one."""
        if seen is not None and up_s - self._seen_at <= LEASE_S:
            for holder, until in record.leases.items():
                if seen.leases.get(holder) != until:
                    self._heard[holder] = up_s
        self._heard = {holder: at for holder, at in self._heard.items() if up_s - at <= LEASE_S}
        return {self._holder, *self._heard}

    def _window(self, limit: Limit, record: QuotaRecord, now: float, seen: QuotaRecord | None) -> Window:
        """Return the present window of a limit in a record, and create it if necessary. If the record has lost it, it
        is the one that this ingress has seen last."""
        newest = record.newest(limit.name, now + CLOCKS_S)
        if newest is not None and newest.start > self._tallies[limit.name].start:  # this machine's clock is behind
            self._begin(limit, newest.start)
        tally = self._tallies[limit.name]
        window = record.find(limit.name, tally.start)
        if window is None:
            window = None if seen is None else seen.find(limit.name, tally.start)
            if window is None:
                window = Window(tally.start, {})
                if debt := _debt(limit, record.newest(limit.name, tally.start), tally.start):
                    window.used[DEBT] = debt
            record.put(limit.name, window)
        if tally.is_new:
            tally.is_new, tally.written = False, window.used.get(self._holder, 0.0)
            tally.used += tally.written
        return window

    def _forget_written(self) -> None:
        """Start from nothing: after a long silence, what this ingress had written counts for ENDED. Its requests that
        still run are counted again."""
        for tally in (*self._tallies.values(), *self._before.values()):
            if tally.start != ALWAYS:
                tally.used -= tally.written
            tally.written = 0.0

    def _roll(self, now: float) -> None:
        """Begin new windows. If the clock was set back, go on with those before."""
        for name, limit in self._limits.items():
            tally = self._tallies[name]
            if tally.start - CLOCKS_S <= now < tally.end:
                continue
            before, tally = self._before.get(name), self._begin(limit, now)
            if before is not None and before.start == tally.start:
                self._tallies[name] = before

    def _begin(self, limit: Limit, now: float) -> Tally:
        """Begin the window of a time, and return its tally."""
        old = self._before[limit.name] = self._tallies[limit.name]
        start, end = limit.window(now)
        others = None if old.others is None or start < old.start else 0.0  # nobody has used what has just begun
        new = self._tallies[limit.name] = Tally(start, end, others)
        if limit.unit == "tokens" and new.start == old.end:  # a debt that the store does not know of
            new.used = max(0.0, min(old.used - old.written, (old.others or 0.0) + old.used - limit.value))
        return new


def _shortage(limit: Limit, taken: float, needs: Needs, part: float | None = None) -> Shortage | None:
    """Return what is short if a request may not begin after `taken` was used. The last request may exceed a budget.
    part: of this ingress, in place of the limit's value."""
    need, value = needs.get(limit.unit), limit.value if part is None else part
    if need is None or (taken < value if limit.is_cost else not need or taken + need <= value):
        return None
    return Shortage(limit, max(0.0, value - taken), need, is_part=part is not None)


def _debt(limit: Limit, before: Window | None, start: float) -> float:
    """Return how many tokens a new window begins with, because earlier ones had more than the limit. before: the newest
    of them."""
    if before is None or limit.unit != "tokens":
        return 0.0
    first, end = limit.window(before.start)
    passed = round((start - first) / (end - first))
    return max(0.0, before.taken() - limit.value * passed)

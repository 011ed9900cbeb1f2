"""Limits of API keys, on the real quotas: no window of a key has more than its limit allows."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import deployments.quotas.key_quota as key_quota_module
import deployments.quotas.quotas as quotas_module
from deployments.quotas.errors import BudgetSpent, QuotaExceeded
from deployments.quotas.key_quota import KeyQuota, RequestQuota, record_key
from deployments.quotas.limits import BudgetLimit, KeyLimits, Limit, Shortage
from deployments.quotas.quotas import Quotas
from deployments.quotas.record import DEBT, decode
from deployments.quotas.shared_quota import Charge, Needs, SharedQuota, Tally
from deployments.storage.key_value import StoreUnavailable
from engine.errors import ServingError
from tests.days.part import Part
from tests.days.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.days.day import Ask, Day
    from tests.days.ingress import Ingress
    from tests.days.world import World

MINUTE = 1_800_000_000.0 // 60 * 60  # when a minute begins, in seconds since 1970
SLACK = 1e-6
WRITTEN_S = quotas_module.RENEW_S + key_quota_module.SYNC_TIMEOUT_S  # after which what was used is written
Window = tuple[str, float]  # name of a limit, and start


class Book:
    """What requests of one key have really used, over all ingresses."""

    def __init__(self, limits: KeyLimits, off_s: float):
        """off_s: largest error of an ingress's clock."""
        self.off_s = off_s
        self.limits = {limit.name: limit for limit in limits.all()}
        self.used = defaultdict[Window, float](float)
        self.over = defaultdict[Window, float](float)
        """By how much that may exceed the limit: what requests cost more than expected, what ingresses take without the
        store, and what another ingress had admitted."""
        self.most = defaultdict[Window, float](float)
        """The same when it was the most: what requests do not use of their `max_tokens` comes back, and other ingresses
        know it once it is written."""
        self.returned = defaultdict[Window, list[tuple[float, float]]](list)
        """What came back of late: when, by the clock of its ingress, and how much."""
        self.used_at: dict[Window, float] = {}
        """When that was the last time, by the clock of the ingress that did."""
        self.largest = defaultdict[Window, float](float)
        """What was expected of one request, which may be the last of a budget."""
        self.of_dead = defaultdict[Window, float](float)
        """Used by ingresses that are dead."""
        self.forgotten = defaultdict[Window, float](float)
        """Used by ingresses when the store forgot it. They write it again within seconds, or with their next request of
        the key if they have nothing to write."""
        self.lost_at = float("-inf")
        self.quotas: list[CountedQuota] = []

    def add(self, quota: CountedQuota, name: str, start: float, amount: float, over: float) -> None:
        if quota.is_dead:
            return
        window = name, start
        self.used[window] += amount
        now = self.used_at[window] = quota.wall()
        late = [(at, back) for at, back in self.returned[window] if at + WRITTEN_S + 2 * self.off_s > now]
        self.most[window] = max(self.most[window], self.used[window] + sum(back for _, back in late))
        self.returned[window] = [*late, (now, -amount)] if amount < 0 else late
        self.over[window] += over
        quota.used[window] += amount


class CountedQuota(SharedQuota):
    """One ingress's view, which counts in the book what it lets through."""

    def __init__(self, book: Book, part: QuotaPart, wall: Callable[[], float], *args: Any):
        super().__init__(*args, wall())
        self.wall = wall
        self.used = defaultdict[Window, float](float)
        self._book, self._part, self.is_dead, self._is_unasked = book, part, False, False
        book.quotas.append(self)

    def charge(self, needs: Needs, now: float) -> Charge:
        self._is_unasked = True
        charge = super().charge(needs, now)
        self._is_unasked = False
        return charge

    def _apply(self, charge: Charge) -> Charge:
        self._part.note_loss(self._book)
        charge = super()._apply(charge)
        for name, amount in charge.amounts.items():
            window = name, charge.starts[name]
            self._book.add(self, *window, amount, over=amount * self._is_unasked)
            self._book.largest[window] = max(self._book.largest[window], amount)
            self._part.check_window(self._book, window)
        return charge

    def settle(self, charge: Charge, used: Needs, now: float) -> None:
        super().settle(charge, used, now)
        for name, amount in charge.amounts.items():
            limit, start = self._known[name], self._tallies[name].start
            more = -amount if limit.duration is None else used.get(limit.unit, 0.0) - amount
            if limit.unit == "tokens" and 0 < amount < limit.value:
                assert more <= SLACK, "a request has more tokens than it was charged with"
            if start == charge.starts[name] or more > 0:
                self._book.add(self, name, start, more, over=max(0.0, more))

    def raise_to(self, charge: Charge, used: Needs, now: float) -> None:
        before = dict(charge.amounts)
        super().raise_to(charge, used, now)
        for name, amount in charge.amounts.items():
            more = amount - before[name]
            self._book.add(self, name, self._tallies[name].start, more, over=more)

    def _begin(self, limit: Limit, now: float) -> Tally:
        new = super()._begin(limit, now)
        if new.used:
            self._book.add(self, limit.name, new.start, new.used, over=new.used)
        return new

    def alone(self, needs: Needs, now: float) -> Charge | Shortage:
        outcome = super().alone(needs, now)
        self._part.seen["an ingress goes on without the store"] += isinstance(outcome, Charge)
        return outcome


class CountedKey(KeyQuota):
    def __init__(
        self, part: QuotaPart, name: str, limits: KeyLimits, store: Any, holder: str, num_holders: int, wall: Any
    ):
        super().__init__(name, limits, store, holder, num_holders, wall)
        self._number = len(part.books[name].quotas)
        self.shared = CountedQuota(part.books[name], part, wall, holder, self._all, num_holders)

    def __hash__(self) -> int:
        """The same whenever the day is lived through, since sets of keys are in the order of this."""
        return zlib.crc32(f"{self.name} {self._number}".encode())


@dataclass(frozen=True)
class Limits:
    """keys: limits by name. turn_at: when the minute ends. off_s: largest error of an ingress's clock."""

    keys: tuple[tuple[str, KeyLimits], ...]
    turn_at: float
    off_s: float

    def open(self, world: World) -> Part:
        return QuotaPart(world, self)


class QuotaPart(Part):
    def __init__(self, world: World, plan: Limits):
        self._cluster, self._day, self._plan = world.cluster, world.day, plan
        self._rng, self.seen = random.Random(f"{world.day.seed} quotas"), world.cluster.seen
        self._limits = dict(plan.keys)
        self.books = {name: Book(limits, plan.off_s) for name, limits in plan.keys}
        self._quotas: dict[Ingress, Quotas] = {}
        world.quota_of, world.is_refusal = self.of, self.refusal
        chance = SimpleNamespace(token_hex=lambda size: f"{self._rng.getrandbits(8 * size):0{2 * size}x}")
        for module, name, value in (
            (quotas_module, "secrets", chance),
            (quotas_module, "KeyQuota", partial(CountedKey, self)),
            (key_quota_module, "random", self._rng),
        ):
            world.patches.enter_context(mock.patch.object(module, name, value))

    def of(self, ingress: Ingress, ask: Ask) -> RequestQuota | None:
        """Return the quota of a request, as the middleware of an ingress does."""
        if not ask.api_key:
            return None
        if ingress not in self._quotas:
            self._quotas[ingress] = self._open(ingress)
        quota = self._quotas[ingress].of(ask.api_key)
        if quota is not None:
            quota.check()
        return quota

    def _open(self, ingress: Ingress) -> Quotas:
        loop, off_s = self._cluster.loop, self._rng.uniform(-1, 1) * self._plan.off_s
        epoch = MINUTE + 60 - self._plan.turn_at + off_s
        store = open_store(self._cluster, ingress.node, lambda: ingress.up)
        quotas = Quotas(store, self._limits, len(self._cluster.ingresses), wall=lambda: epoch + loop.time())
        ingress.endings.append(lambda: self._lose(quotas))
        return quotas

    def _lose(self, quotas: Quotas) -> None:
        """The ingress has died. Engines end its requests."""
        for key in quotas._keys.values():
            quota = key.shared
            assert isinstance(quota, CountedQuota)
            for window, amount in quota.used.items():
                if self.books[key.name].limits[window[0]].duration is None:
                    self.books[key.name].used[window] -= amount
                else:
                    self.books[key.name].of_dead[window] += amount
            quota.is_dead = True
        for task in [quotas._renewal, *(key._giving_back for key in quotas._keys.values())]:
            if task is not None:
                task.cancel()

    def note_loss(self, book: Book) -> None:
        """Note what others may not know, if the store has lost its values since the last charge."""
        if self._cluster.redis.lost_at > book.lost_at:
            book.lost_at = self._cluster.redis.lost_at
            for quota in [quota for quota in book.quotas if not quota.is_dead]:
                for window, amount in quota.used.items():
                    book.forgotten[window] += amount

    def check_window(self, book: Book, window: Window) -> None:
        """Check that a request that has just begun may."""
        limit = book.limits[window[0]]
        if limit.duration is None and (self._cluster.store_fails or self._cluster.stands_still):
            return  # places of an ingress that is only silent are given away
        most = limit.value + book.over[window] + (book.largest[window] if limit.is_cost else 0.0)
        if self._cluster.redis.lost_at > 0:
            most += book.of_dead[window] + book.forgotten[window]
        assert book.used[window] <= most + SLACK, f"an API key exceeds its {limit.name}"
        self.seen[f"{limit.unit} of an API key are charged"] += 1

    def refusal(self, ask: Ask, error: ServingError) -> bool:
        """Check a refusal. Returns whether the error is one."""
        if not ask.api_key or not isinstance(error, QuotaExceeded | BudgetSpent | StoreUnavailable):
            return False
        self.seen[f"API key refused: {getattr(error, 'param', 'store')}"] += 1
        match error:
            case StoreUnavailable():
                cluster = self._cluster  # an ingress that stood still finds its own deadlines over
                is_late = cluster.stands_still or self._day.late_s > key_quota_module.SYNC_TIMEOUT_S / 4
                assert cluster.store_fails or is_late, "a store that was always there is said to be away"
            case QuotaExceeded() if self._day.is_calm:
                book, name = self.books[ask.api_key], str(error.param)
                limit = book.limits[name]
                used = max((most for (of, _), most in book.most.items() if of == name), default=0.0)
                own = sum(len(request.prompt) + request.params.max_tokens for request in ask.requests)
                enough = used + (own if limit.unit == "tokens" else 1) > limit.value
                comes_back = limit.is_cost or limit.duration is None  # until its client is told
                assert comes_back or enough, f"a request is refused, but at most {used} of {name} were used"
        return True

    def check_end(self) -> None:
        """All that was used is written, and nothing is in flight."""
        redis = self._cluster.redis
        for ingress, quotas in self._quotas.items():
            if not ingress.up:
                continue
            for name, key in quotas._keys.items():
                assert not key.shared._in_flight, f"{ingress.node}: requests of {name} left"
                assert key.shared.is_settled, f"{ingress.node}: something of {name} is not written"
        died = any(not ingress.up for ingress in self._quotas)
        for name, book in self.books.items():
            stored = redis.get(record_key(name))
            if stored is None or self._cluster.store_fails or died or self._cluster.stands_still:
                continue
            record = decode(stored)
            for limit in book.limits.values():
                newest = max((start for of, start in book.used if of == limit.name), default=None)
                if newest is None or (window := record.find(limit.name, newest)) is None:
                    continue
                if book.used_at[limit.name, newest] + WRITTEN_S + 2 * self._plan.off_s > limit.window(newest)[1]:
                    continue  # it ended before that was written, if only by another clock, and nobody reads it any more
                written, used = window.taken(DEBT), book.used[limit.name, newest]
                assert abs(written - used) < SLACK, f"{limit.name} of {name}: {written} is written, {used} was used"
                self.seen["what a key has used is written"] += 1


def add(day: Day, rng: random.Random) -> Day:
    """Give some days API keys with limits."""
    if rng.random() < 0.8:
        return day
    names = ["alice", "bob"][: rng.choice([1, 2])]
    keys = tuple((name, _limits(rng)) for name in names)
    asks = tuple(replace(ask, api_key=rng.choice([*names, *names, ""])) for ask in day.asks)
    by_request = {ask.requests[0].request_id: ask.api_key for ask in asks}  # one that is sent twice has one key
    asks = tuple(replace(ask, api_key=by_request[ask.requests[0].request_id]) for ask in asks)
    length_s = max(ask.at for ask in asks)
    turn_at = rng.choice([50.0, rng.uniform(0.0, length_s)])
    faults = day.faults
    if faults and not day.only_losses:
        from tests.days.day import Fault

        kinds = rng.choice([(), ("store away",), ("store away", "kill ingress"), ("kill ingress",)])
        faults += tuple(
            Fault(
                rng.uniform(0, length_s), rng.choice(kinds), rng.randrange(100), rng.randrange(100), rng.uniform(0, 6)
            )
            for _ in range(rng.choice([1, 3]) if kinds else 0)
        )
    plan = Limits(keys, turn_at, rng.choice([0.0, 0.5, 3.0]))
    return replace(day, asks=asks, faults=faults, parts=(*day.parts, plan))


def _limits(rng: random.Random) -> KeyLimits:
    budget = BudgetLimit(budget_duration=rng.choice(["5s", "1m", "1d"]), max_engine_seconds=rng.choice([0.1, 0.5, 3.0]))
    return KeyLimits(
        rpm_limit=rng.choice([None, 2, 5, 10]),
        tpm_limit=rng.choice([None, None, 150, 400]),
        max_parallel_requests=rng.choice([None, 1, 3]),
        budget_limits=(budget,) if rng.random() < 0.4 else (),
        ends_running_requests=rng.random() < 0.5,
    )

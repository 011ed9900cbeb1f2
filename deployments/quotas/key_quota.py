"""The limits of one API key in one ingress, and what one request needs of them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from deployments.billing.bill import Bill, Used
from deployments.frontend.observers import GenerationObserver, RequestSize
from deployments.quotas.errors import BudgetSpent, PromptExceedsLimit, QuotaExceeded
from deployments.quotas.limits import KeyLimits, Shortage, Unit
from deployments.quotas.shared_quota import PLACE_PAUSE_S, Charge, Needs, Proposal, SharedQuota
from deployments.storage.key_value import KeyValueStore, StoreUnavailable

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 0.25
"""Seconds for which a request may wait for the store. Then the ingress spends its part of what is left by itself."""
FIRST_TIMEOUT_S = 10.0
"""The same for the first answer of the store, without which nothing can be spent: a disk may be busy while a server
starts."""
RETRY_S = 1.0
"""Seconds without the store, after it has not answered."""
PLACE: Needs = {"parallel": 1.0}
NO_COSTS: dict[Unit, float] = {"money": 0.0, "engine_seconds": 0.0}
MAX_WAITING = 256  # requests of a key for a place, since each looks for one 20 times a second
PLACE_WAIT_S = 0.25
"""Seconds for which a request waits for places that requests of other ingresses have: a client may know before this
ingress that one of them has ended."""
TRIES = 16  # to write before another ingress does
LOST_S = 0.01  # maximum pause after another ingress was first, so that not all try again at the same time
TTL_S = 10 * 365 * 86400.0
"""Of a key's record, at least. A file's values are gone once a clock was set ahead by more."""
MEMORY = 64  # newest answers of a key, of which the longest bounds the next
FADES = 0.05  # weight of a request in the means from which the next one is estimated


class Means:
    """What requests of a key have recently used, from which the next one is estimated."""

    def __init__(self) -> None:
        self.output_tokens = 0.0
        self.per_token: dict[Unit, float] = {}
        self._newest: deque[float] = deque(maxlen=MEMORY)  # output tokens of the sequences of a request

    def costs_of(self, size: RequestSize) -> dict[Unit, float]:
        output = self.output_tokens if size.max_tokens is None else min(self.output_tokens, size.max_tokens)
        tokens = size.prompt_tokens + size.sequences * output
        return {**NO_COSTS, **{unit: each * tokens for unit, each in self.per_token.items()}}

    def most_tokens(self, size: RequestSize) -> float:
        """Return an upper bound of the tokens of a request: by `max_tokens` if it says that, else by the longest of the
        newest answers, or by the context before MEMORY of them are known."""
        output: float | None = size.max_tokens
        if output is None:
            output = max(self._newest) if len(self._newest) == MEMORY else size.context_tokens
        return size.prompt_tokens + size.sequences * output

    def observe(self, size: RequestSize, used: Used) -> None:
        self._newest.append(used.output_tokens / size.sequences)
        self.output_tokens += self._weight * (used.output_tokens / size.sequences - self.output_tokens)
        tokens = max(1, used.prompt_tokens + used.output_tokens)
        costs: dict[Unit, float] = {"engine_seconds": used.engine_seconds, "money": used.money}
        for unit, cost in costs.items():
            known = self.per_token.get(unit, cost / tokens)
            self.per_token[unit] = known + FADES * (cost / tokens - known)

    @property
    def _weight(self) -> float:
        return FADES if self.per_token else 1.0


@dataclass(eq=False, slots=True)
class Ask:
    """A request that waits for its charge."""

    needs: Needs
    outcome: Charge | Shortage | None = None
    """None as long as the store has not answered."""


class KeyQuota:
    """All requests of one key in this ingress."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        store: KeyValueStore,
        holder: str,
        num_holders: int,
        wall: Callable[[], float] = time.time,
    ):
        """holder: name of this ingress, which no other ingress has. num_holders: number of ingresses. wall: returns
        seconds since 1970."""
        self.name, self.limits, self.means = name, limits, Means()
        self._store, self._wall = store, wall
        self._all = limits.all()
        self.shared = SharedQuota(holder, self._all, num_holders, wall())
        self.on_charge: Callable[[], None] = lambda: None
        """Called when a request is about to be charged, which may be long after it has come."""
        self._asking = asyncio.Lock()
        self._asks: list[Ask] = []
        self._giving_back: asyncio.Task[None] | None = None
        self._has_freed = False
        self._num_waiting = 0  # for a place
        self._num_proposals = 0
        self._reached = True
        self._retry_at = 0.0

    def change(self, limits: KeyLimits) -> None:
        self.limits, self._all = limits, limits.all()
        self.shared.change(self._all, self._wall())

    @property
    def is_settled(self) -> bool:
        """Whether no request runs or asks, and the store has everything."""
        return not self._asks and self.shared.is_settled

    @property
    def ends_running(self) -> bool:
        return self.limits.ends_running_requests and bool(self.limits.budget_limits)

    def estimate(self, size: RequestSize) -> dict[Unit, float]:
        """Return what a request needs: the most tokens that it can have, and the costs that it probably has, but at
        most the whole limit, so that it runs if it is alone in its window. Costs that are counted while the request
        runs are not expected."""
        needs = dict(NO_COSTS) if self.ends_running else self.means.costs_of(size)
        needs["tokens"] = self.means.most_tokens(size)
        for limit in self._all:
            if limit.unit in needs:
                needs[limit.unit] = min(needs[limit.unit], limit.value)
        return needs

    async def take(self, needs: Needs) -> Charge:
        """Charge a request with what it needs at most, or probably. Raises QuotaExceeded, and StoreUnavailable if
        nothing is known of a limit."""
        self.on_charge()
        self.check(needs)
        ask = Ask(needs)
        self._asks.append(ask)
        try:
            while ask.outcome is None and await self.sync(ask):
                pass
        except BaseException:
            if isinstance(ask.outcome, Charge):
                self.settle(ask.outcome, {})
            raise
        finally:
            if ask.outcome is None:
                self._asks.remove(ask)
        outcome = ask.outcome
        if outcome is None:
            outcome = self.shared.alone(needs, self._wall())
            if isinstance(outcome, Shortage) and self.shared.is_unknown(outcome.limit):
                raise StoreUnavailable(f"it has the limits of API key {self.name!r}")
        if isinstance(outcome, Charge):
            return outcome
        raise self._exceeded(outcome)

    async def take_place(self) -> Charge:
        """Charge a request with one of the places of max_parallel_requests. Waits a moment if requests of other
        ingresses have places, unless MAX_WAITING requests wait. Raises QuotaExceeded, and StoreUnavailable if nothing
        is known of the places."""
        began_at = _now()
        while True:
            try:
                return await self.take(PLACE)
            except QuotaExceeded:
                too_late = _now() >= began_at + PLACE_WAIT_S or not self.shared.others_have_places
                if too_late or self._num_waiting >= MAX_WAITING:
                    raise
            self._num_waiting += 1
            try:
                await asyncio.sleep(PLACE_PAUSE_S)
            finally:
                self._num_waiting -= 1

    def leave_place(self, charge: Charge) -> None:
        """Settle what `take_place` or `begin` has returned, and tell other ingresses at once."""
        self.settle(charge, {})
        if self.shared.has_others:
            self._has_freed = True
            if self._giving_back is None or self._giving_back.done():
                self._giving_back = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        while self._has_freed:  # also places that come free while the store is written
            self._has_freed = False
            await self.sync()

    def begin(self, needs: Needs) -> Charge:
        """Charge a request that another ingress had admitted, whatever is left of the limits."""
        self.on_charge()
        return self.shared.charge(needs, self._wall())

    def check_prompt(self, tokens: int) -> None:
        """See RequestQuota.check_prompt."""
        for limit in self._all:
            if limit.unit == "tokens" and tokens > limit.value:
                raise PromptExceedsLimit(self.name, limit.name, limit.value, tokens)

    def check_budgets(self, charge: Charge, used: Used) -> None:
        """Charge a running request with what it has cost so far. Raises BudgetSpent if a budget is used up."""
        costs: dict[Unit, float] = {"engine_seconds": used.engine_seconds, "money": used.money}
        self.shared.raise_to(charge, costs, self._wall())
        for limit in self._all:
            if limit.is_cost and self.shared.remaining(limit) <= 0 and not self.shared.is_unknown(limit):
                raise BudgetSpent(self.name, limit.name, limit.value)

    def check(self, needs: Needs) -> None:
        """Raise QuotaExceeded if there was not enough a moment ago."""
        if (short := self.shared.refused(needs, self._wall())) is not None:
            raise self._exceeded(short)

    def settle(self, charge: Charge, used: Needs) -> None:
        self.shared.settle(charge, used, self._wall())

    async def sync(self, ask: Ask | None = None) -> bool:
        """Write what has been used, and let requests that ask begin. Returns whether the store answered. Callers that
        come meanwhile share one exchange. ask: the caller's, which may have an outcome meanwhile."""
        asked = self._num_proposals
        async with self._asking:
            if self._num_proposals == asked if ask is None else ask.outcome is None:
                self._reached = await self._exchange()
            return self._reached

    async def _exchange(self) -> bool:
        if _now() < self._retry_at:
            return False
        key, ttl_s, lost = record_key(self.name), self._ttl_s(), False
        try:
            is_first = any(map(self.shared.is_unknown, self._all))
            async with asyncio.timeout(FIRST_TIMEOUT_S if is_first else SYNC_TIMEOUT_S):
                for _ in range(TRIES):
                    stored = await self._store.get(key)
                    asks = list(self._asks)
                    proposal = self._propose(stored, asks)
                    if await self._store.replace(key, stored, proposal.value, ttl_s):
                        for ask, outcome in zip(asks, self.shared.commit(proposal, self._wall(), _now()), strict=True):
                            ask.outcome = outcome
                            if ask in self._asks:
                                self._asks.remove(ask)
                            elif isinstance(outcome, Charge):  # its client has left meanwhile
                                self.settle(outcome, {})
                        return True
                    lost = True
                    await asyncio.sleep(random.uniform(0.0, LOST_S))
        except (StoreUnavailable, TimeoutError) as error:
            logger.debug("quota not written key=%s error=%s", self.name, error or type(error).__name__)
        if not lost:
            self._retry_at = _now() + RETRY_S
        return False

    def _ttl_s(self) -> float:
        """Return for how many seconds the store must have the record: until all windows have ended."""
        ends = (self.shared.ends_at(limit) for limit in self._all if limit.duration is not None)
        return max(TTL_S, max(ends, default=0.0) - self._wall())

    def _propose(self, stored: bytes | None, asks: list[Ask]) -> Proposal:
        self._num_proposals += 1
        try:
            return self.shared.propose(stored, self._wall(), _now(), [ask.needs for ask in asks])
        except ValueError as error:
            raise StoreUnavailable(f"the record of API key {self.name!r} cannot be read ({error})") from error

    def _exceeded(self, short: Shortage) -> QuotaExceeded:
        limit = short.limit
        wait_s = 1.0 if limit.duration is None else max(1.0, self.shared.ends_at(limit) - self._wall())
        return QuotaExceeded(self.name, short, wait_s)

    def headers(self, *, anthropic: bool) -> dict[str, str]:
        """See RequestQuota.headers."""
        found: dict[str, str] = {}
        for limit in self._all:
            if limit.field not in ("rpm_limit", "tpm_limit"):
                continue
            unit, ends_at = limit.unit, self.shared.ends_at(limit)
            left, whole = str(int(self.shared.remaining(limit))), str(int(limit.value))
            if anthropic:
                reset = datetime.fromtimestamp(ends_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                prefix = f"anthropic-ratelimit-{unit}"
                found |= {f"{prefix}-limit": whole, f"{prefix}-remaining": left, f"{prefix}-reset": reset}
            else:
                reset = f"{max(0.0, ends_at - self._wall()):.3f}s"
                names = (f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset"))
                found |= dict(zip(names, (whole, left, reset), strict=True))
        return found


def _now() -> float:
    """Return seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()


def record_key(name: str) -> str:
    """Return the key in the store of what was spent by keys of this name."""
    return f"manta:quota:{name}"


class RequestQuota:
    """The limits that apply to one HTTP request. It counts once, also if it is computed in several parts."""

    def __init__(self, key: KeyQuota):
        self.watches_cost = key.ends_running
        """Whether engines must report what the request costs while it runs."""
        self._key, self._counted, self._num_running = key, False, 0
        self._has_slots = key.limits.max_parallel_requests is not None
        self._slot: Charge | None = None

    def lowered(self, priority: int) -> int:
        """Return the priority of a request that asks for this one. Smaller numbers run first."""
        return max(priority, self._key.limits.priority) if priority else self._key.limits.priority

    def check(self) -> None:
        """Raise QuotaExceeded if the request would be refused. Call it before doing any work for the request."""
        self._key.check({"requests": 1, "tokens": 1, **NO_COSTS})

    def check_prompt(self, tokens: int) -> None:
        """Raise PromptExceedsLimit for a prompt that could never run."""
        self._key.check_prompt(tokens)

    def check_budgets(self, charge: Charge, used: Used) -> None:
        """Charge the request with what it has cost so far. Raises BudgetSpent if a budget is used up."""
        self._key.check_budgets(charge, used)

    @asynccontextmanager
    async def charged(self, size: RequestSize, bill: Bill) -> AsyncGenerator[Charge]:
        """Charge the request while it runs, and settle once its bill is known. Entering raises QuotaExceeded,
        PromptExceedsLimit and StoreUnavailable."""
        if not size.resumes:
            self._key.check_prompt(size.prompt_tokens)
        counts, self._counted = not self._counted and not size.resumes, True
        needs: dict[Unit, float] = {"requests": float(counts), "parallel": 0.0, **self._key.estimate(size)}
        self._num_running += 1
        try:
            if self._has_slots and self._num_running == 1:
                self._slot = self._key.begin(PLACE) if size.resumes else await self._key.take_place()
            charge = self._key.begin({}) if size.resumes else await self._key.take(needs)
            try:
                yield charge
            finally:
                bill.when_known(lambda: self._settle(charge, size, bill.used(), counts))
        finally:
            self._num_running -= 1
            if not self._num_running and self._slot is not None:
                self._key.leave_place(self._slot)
                self._slot = None

    def _settle(self, charge: Charge, size: RequestSize, used: Used, counts: bool) -> None:
        if not used.started:
            self._key.settle(charge, {})
            return
        tokens = used.output_tokens + (0 if size.resumes else used.prompt_tokens)
        requests = float(counts)
        self._key.settle(
            charge,
            {"requests": requests, "tokens": tokens, "engine_seconds": used.engine_seconds, "money": used.money},
        )
        self._key.means.observe(size, used)

    def headers(self, *, anthropic: bool) -> dict[str, str]:
        """Return the headers that tell clients how much of each limit is left."""
        return self._key.headers(anthropic=anthropic)

    def observer(self, size: RequestSize, bill: Bill) -> GenerationObserver:
        return (BudgetWatch if self.watches_cost else ChargedRequest)(self, size, bill)


class ChargedRequest(GenerationObserver):
    """Charges a key while one of its requests, or a part of it, runs."""

    def __init__(self, quota: RequestQuota, size: RequestSize, bill: Bill):
        self._quota, self._size, self._bill = quota, size, bill
        self._charge: Charge | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with self._quota.charged(self._size, self._bill) as self._charge:
            yield


class BudgetWatch(ChargedRequest):
    """Ends the request when a budget of its key is used up."""

    async def taking(self, num_tokens: int) -> None:
        assert self._charge is not None, "it has not been entered"
        self._quota.check_budgets(self._charge, self._bill.used())


_current: ContextVar[RequestQuota | None] = ContextVar("quota", default=None)


def current_quota() -> RequestQuota | None:
    """Return the quota of the HTTP request on which the current task works; None if its API key has no limits."""
    return _current.get()


def observe_generation(size: RequestSize, bill: Bill) -> GenerationObserver | None:
    """Return what charges the HTTP request on which the current task works."""
    quota = current_quota()
    return None if quota is None else quota.observer(size, bill)

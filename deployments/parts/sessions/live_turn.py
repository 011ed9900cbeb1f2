"""The turn of one HTTP request, in the ingress that handles it."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from dataclasses import dataclass

from deployments.billing.bill import Bill, Used
from deployments.frontend.observers import RequestSize
from deployments.observability.telemetry import current_request
from deployments.parts.sessions.books import SessionBooks
from deployments.parts.sessions.errors import SessionBudgetSpent
from deployments.parts.sessions.record import HEADERS, Asked, Budget, SessionTree, StoredTurn, Unit, grant
from deployments.storage.key_value import StoredValueCorrupt, StoreUnavailable
from engine.wire.generate_request import GenerateRequest

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 2.0
"""Seconds for which a request waits for the store. Then one without a budget goes on, and one that has nothing left of
what it has taken of its budget ends."""
LOW = 1 / 4  # what is left of what a turn has taken when it asks for more
WRITE_AGAIN_S = 1.0
WRITES = 60  # to write what has been used, before that is given up
GRACE_S = 30.0  # after a request's time limit, by when it has ended
NO_LIMIT_S = 3600.0  # time limit of requests that have none


@dataclass(slots=True)
class Hand:
    """What a turn may use of its budgets of one unit."""

    until: float = 0.0
    """Up to here it need not ask."""
    end: float = math.inf
    """So much there was in all when it asked; infinite until the store has answered."""
    step: float = 0.0
    """Money that its sequences use in one step; 0 while that is unknown."""
    low: float = 0.0
    """So much before `until`, it asks for more."""

    def is_low(self, used: float) -> bool:
        return used >= self.until - self.low


class LiveTurn:
    """Counts all that engines compute for one request of a session, in one or several parts.

    With a budget, it takes parts of that for STEPS steps at a time, by one write to the store each. So what all turns
    have taken together is never more than the budget, in however many ingresses they run.
    """

    def __init__(
        self, books: SessionBooks, owner: str, asked: Asked, request: GenerateRequest, model: str, *, has_prices: bool
    ):
        """request: one of its sequences. model: that computes it. has_prices: whether that costs money."""
        now = books.now()
        self.asked = asked
        self.turn = StoredTurn(
            id=request.request_id.rsplit("-", 2)[0],
            session=asked.session,
            model=model,
            began_at=now,
            attempt=secrets.token_hex(8),
            ends_by=now + (request.timeout_s or NO_LIMIT_S) + GRACE_S,
        )
        self.over = False
        """Whether its sequences end with the next token, because a budget is used up."""
        self.num_open = 0
        """Sequences that have not ended."""
        self._books, self._owner, self._has_prices = books, owner, has_prices
        self._started_at = current_request().started_at
        self._root, self._epoch = "", ""
        self._bills: list[Bill] = []
        self._num_running = 0  # parts
        self._num_sequences = 0
        self._hands: dict[Unit, Hand] = {}  # of units of which there are budgets
        self._budgets: list[Budget] = []  # as the store had them last, without this turn
        self._kept: dict[Unit, float] = {}  # up to which it may always get, as whoever computed it before
        self._output_tokens = 0
        self._last: tuple[float, float] | None = None  # output tokens and money when that was last looked at
        self._writing: asyncio.Task[None] | None = None
        self._is_dirty = False

    @property
    def watches_cost(self) -> bool:
        """Whether engines must report what the request costs while it runs."""
        return "money" in self._hands

    async def enter(self, size: RequestSize, bill: Bill) -> None:
        """Count a part of the request. Raises SessionBudgetSpent, InvalidParameter; and StoreUnavailable if the request
        itself names a budget, which cannot be kept now."""
        self._bills.append(bill)
        self._num_sequences += size.sequences
        if self._epoch:
            await self.renew(size.prompt_tokens)
            hand, used = self._hands.get("tokens"), self._used_of("tokens", self._used())
            if hand is not None and used + size.prompt_tokens > hand.until:
                raise self._spent(size.prompt_tokens)
            self.turn.prompt_tokens += size.prompt_tokens
        else:
            self.turn.prompt_tokens = size.prompt_tokens
            await self._begin(size)
        if self.over and size.max_tokens != 0 and not size.resumes:
            raise self._spent(0)
        self._num_running += 1

    def leave(self, bill: Bill) -> None:
        """Note that a part has ended. What it has cost may be known only later."""
        self._num_running -= 1
        self.turn.seconds = time.monotonic() - self._started_at
        self.close()
        bill.when_known(self.close)

    def close(self) -> None:
        """Write the turn if all of it has ended."""
        if self._num_running or self.num_open:
            return
        self.turn.finish_reason = self.turn.finish_reason or "abort"
        self.turn.reserved_tokens = self.turn.reserved_money = 0.0
        self._is_dirty = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def written(self, timeout_s: float) -> None:
        """Wait until the turn is written, if it has ended."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=timeout_s)

    def take(self, num_tokens: int) -> int:
        """Count tokens that have come. Returns how many of them there may be; see also `over`."""
        if (hand := self._hands.get("tokens")) is not None:
            used = self.turn.prompt_tokens + self._output_tokens
            allowed = int(min(num_tokens, max(0.0, hand.until - used)))
            self.over = self.over or allowed < num_tokens or used + allowed >= hand.end
            num_tokens = allowed
        self._output_tokens += num_tokens
        return num_tokens

    async def renew(self, num_tokens: int) -> None:
        """Take more of the budgets, if what was taken is nearly used up. num_tokens: that have come."""
        if self.over or not self._hands:
            return
        used = self._used()
        if self.watches_cost:
            self._measure(used)
        need: dict[Unit, int] = {"tokens": num_tokens, "money": 0}
        if any(hand.is_low(self._used_of(unit, used) + need[unit]) for unit, hand in self._hands.items()):
            await self._ask(num_tokens)

    async def _begin(self, size: RequestSize) -> None:
        need = size.prompt_tokens + (size.max_tokens != 0)
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                self._root, tree = await self._books.begin(
                    self._owner, self.asked, self.turn, need=need, resumes=size.resumes
                )
        except (StoreUnavailable, StoredValueCorrupt, TimeoutError) as error:
            if self.asked.max_tokens is not None or self.asked.max_budget is not None:
                raise StoreUnavailable("it has the budget of the session") from error
            logger.warning("session not read session=%s error=%s", self.asked.session, error or "timeout")
            return
        self._epoch = tree.epoch
        units = {budget.unit for budget in tree.budgets(self.asked.session, self._books.now())}
        self._hands = {unit: Hand() for unit in units if unit == "tokens" or self._has_prices}
        self._kept = {unit: self.turn.used(unit) + self.turn.reserved(unit) for unit in self._hands}
        if self._hands:
            await self._ask(1)

    async def _ask(self, num_tokens: int) -> None:
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await self._take_more(num_tokens)
        except (StoreUnavailable, StoredValueCorrupt, TimeoutError) as error:
            used = self._used()
            self.over = any(self._used_of(unit, used) >= hand.until for unit, hand in self._hands.items())
            logger.warning("session not written session=%s error=%s", self.asked.session, error or "timeout")

    async def _take_more(self, num_tokens: int) -> None:
        self._account(self._used())
        turn = self.turn

        def take(tree: SessionTree) -> dict[Unit, float] | None:
            if not tree.put(turn):
                return None
            left: dict[Unit, float] = {}
            self._budgets = tree.budgets(turn.session, self._books.now(), without=turn)
            for budget in self._budgets:
                left[budget.unit] = min(left.get(budget.unit, math.inf), budget.left - turn.used(budget.unit))
            for unit, hand in self._hands.items():
                step = max(num_tokens, self._num_sequences) if unit == "tokens" else hand.step
                reserved = max(grant(left.get(unit, math.inf), step), self._kept[unit] - turn.used(unit))
                if unit == "tokens":
                    turn.reserved_tokens = reserved // 1
                else:
                    turn.reserved_money = reserved
            return left

        done = await self._books.write(self._owner, self._root, self._epoch, take)
        if done is None:  # the session was deleted, with its budgets
            self._hands = {}
            return
        for unit, hand in self._hands.items():
            left, used = done[1].get(unit, math.inf), turn.used(unit)
            hand.until = used + turn.reserved(unit)
            hand.end = max(hand.until, used + left)
            hand.low = LOW * turn.reserved(unit) if hand.end > hand.until else 0.0
            self.over = self.over or used >= hand.end

    def _measure(self, used: Used) -> None:
        """Learn what a step costs, from the tokens since the last look."""
        now = (float(used.output_tokens), used.money)
        if self._last is not None and 0 < self._last[0] < now[0]:
            each = (now[1] - self._last[1]) / (now[0] - self._last[0])
            self._hands["money"].step = max(0.0, each) * self._num_sequences
        self._last = now

    def _used(self) -> Used:
        """Return what all parts have used so far."""
        parts = [used for bill in self._bills if (used := bill.used()).started]
        return Used(
            bool(parts),
            sum(used.prompt_tokens for used in parts),
            sum(used.output_tokens for used in parts),
            sum(used.engine_seconds for used in parts),
            sum(used.money for used in parts),
            sum(used.cached_tokens for used in parts),
        )

    def _used_of(self, unit: Unit, used: Used) -> float:
        return self.turn.prompt_tokens + self._output_tokens if unit == "tokens" else used.money

    def _account(self, used: Used) -> None:
        turn = self.turn
        turn.cached_tokens, turn.output_tokens = used.cached_tokens, used.output_tokens
        turn.compute_seconds, turn.cost = used.engine_seconds, used.money

    def _spent(self, need: float) -> Exception:
        """Return the error of a part that takes more than there is. need: tokens."""
        if not self._budgets:
            return StoreUnavailable("it has the budget of the session")
        left = [(budget.left - self.turn.used(budget.unit), budget) for budget in self._budgets]
        least, budget = min(left, key=lambda each: each[0])
        return SessionBudgetSpent(budget.session, HEADERS[budget.unit], budget.value, max(0.0, least), need)

    async def _write(self) -> None:
        for _ in range(WRITES):
            self._is_dirty = False
            try:
                await self._put()
            except (StoreUnavailable, StoredValueCorrupt):
                self._is_dirty = True
                await asyncio.sleep(WRITE_AGAIN_S)
            if not self._is_dirty:
                return
        logger.error("turn not written session=%s turn=%s", self.asked.session, self.turn.id)

    async def _put(self) -> None:
        """Write what is known of the turn now. If nothing was admitted, it is forgotten."""
        used, turn = self._used(), self.turn
        self._account(used)
        turn.prompt_tokens = used.prompt_tokens
        if not self._epoch:
            if used.started:  # it began while the store did not answer
                self._root, tree = await self._books.begin(self._owner, self.asked, turn, need=0, resumes=True)
                self._epoch = tree.epoch
            return

        def put(tree: SessionTree) -> bool | None:
            if used.started:
                return tree.put(turn) or None
            tree.drop(turn)
            return True

        await self._books.write(self._owner, self._root, self._epoch, put)

"""What the store has of a session and of all below it: turns, sums and budgets. Pure Python: no clock, no store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec

from deployments.parts.sessions.errors import SessionBudgetSpent
from engine.errors import InvalidParameter

PARENT_HEADER = "x-parent-session-id"
TOKENS_HEADER, MONEY_HEADER = "x-session-max-tokens", "x-session-max-budget"
MAX_TURNS = 128
"""Turns of a session, and of all below it, that are told apart. Of older ones there are sums."""
MAX_BELOW = 64
"""Sessions of one tree. The one that was unused for longest is then added to the one above it."""
STEPS = 64
"""Steps for which a turn takes a part of its budgets at a time."""

Unit = Literal["tokens", "money"]
HEADERS: dict[Unit, str] = {"tokens": TOKENS_HEADER, "money": MONEY_HEADER}


class SessionTurn(msgspec.Struct, kw_only=True):
    """One request of a session."""

    id: str
    """`id` of the answer."""
    session: str
    model: str
    began_at: float
    """Seconds since 1970."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were cached."""
    output_tokens: int = 0
    compute_seconds: float = 0.0
    """As in `usage.cost_details`."""
    cost: float = 0.0
    """Money by the model's prices."""
    wait_s: float | None = None
    """Seconds in the queues of the ingress and of the first engine."""
    first_token_s: float | None = None
    """Seconds from the HTTP request to the first token."""
    seconds: float | None = None
    """Seconds from the HTTP request to the end; None while it runs."""
    finish_reason: str | None = None
    """`stop`, `length`, `budget`, `abort`, `error`; `lost` if its ingress has died; None while it runs."""
    engines: list[str] = []
    """Engines that have sent tokens, oldest first."""


class StoredTurn(SessionTurn, kw_only=True):
    attempt: str
    """Who computes it, and may write it."""
    ends_by: float
    """When it has ended or is lost, in seconds since 1970."""
    reserved_tokens: float = 0.0
    """Tokens that it may use without asking for more."""
    reserved_money: float = 0.0

    def runs(self, now: float) -> bool:
        return self.finish_reason is None and now < self.ends_by

    def used(self, unit: Unit) -> float:
        return self.prompt_tokens + self.output_tokens if unit == "tokens" else self.cost

    def reserved(self, unit: Unit) -> float:
        return self.reserved_tokens if unit == "tokens" else self.reserved_money

    def spent(self, unit: Unit, now: float) -> float:
        """Return what it has used, and what it may still use while it runs."""
        return self.used(unit) + (self.reserved(unit) if self.runs(now) else 0.0)

    def shown(self, now: float) -> SessionTurn:
        """Return what clients see of it."""
        turn = SessionTurn(**{name: getattr(self, name) for name in SessionTurn.__struct_fields__})
        if self.finish_reason is None and not self.runs(now):
            turn.finish_reason = "lost"
        return turn


class SessionUsage(msgspec.Struct):
    """Sums over turns."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    compute_seconds: float = 0.0
    cost: float = 0.0

    def add(self, other: SessionUsage) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_turn(self, turn: SessionTurn) -> None:
        self.turns += 1
        for name in self.__struct_fields__[1:]:
            setattr(self, name, getattr(self, name) + getattr(turn, name))

    def used(self, unit: Unit) -> float:
        return self.prompt_tokens + self.output_tokens if unit == "tokens" else self.cost


class Session(msgspec.Struct):
    parent: str
    """Session above it; empty for none."""
    created_at: float
    """Seconds since 1970."""
    used_at: float
    """When its newest turn began."""
    max_tokens: int | None = None
    """Budget of the tokens of prompts and answers, of this session and all below it; None for none."""
    max_budget: float | None = None
    """The same in money."""
    before: SessionUsage = msgspec.field(default_factory=SessionUsage)
    """Of turns, and of sessions below, that are no longer told apart."""

    def maximum(self, unit: Unit) -> float | None:
        return self.max_tokens if unit == "tokens" else self.max_budget


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left of one."""

    session: str
    unit: Unit
    value: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request says of its session."""

    session: str
    parent: str
    """Empty if it does not say."""
    max_tokens: int | None
    """None to leave the budget as it is."""
    max_budget: float | None


class SessionTree(msgspec.Struct):
    """A session and all below it. Each turn is written by whoever computes it, so writing it twice changes nothing."""

    epoch: str
    """Tells it apart from one that was deleted."""
    sessions: dict[str, Session] = {}
    """By name."""
    turns: list[StoredTurn] = []
    """Oldest first."""
    listed_at: float = 0.0
    """When the list of sessions of the API key was last told of it."""

    def chain(self, name: str) -> list[str]:
        """Return a session and all above it."""
        found = []
        while name:
            found.append(name)
            name = self.sessions[name].parent
        return found

    def below(self, name: str) -> list[str]:
        """Return a session and all below it, in the order in which they have begun."""
        return [each for each in self.sessions if name in self.chain(each)]

    def usage(self, names: Collection[str]) -> SessionUsage:
        total = SessionUsage()
        for name in names:
            total.add(self.sessions[name].before)
        for turn in self.turns:
            if turn.session in names:
                total.add_turn(turn)
        return total

    def budgets(self, name: str, now: float, without: StoredTurn | None = None) -> list[Budget]:
        """Return the budgets of which the turns of a session take, with what is left when one turn has used nothing."""
        found: list[Budget] = []
        for above in self.chain(name):
            below = self.below(above)
            for unit in HEADERS:
                if (value := self.sessions[above].maximum(unit)) is None:
                    continue
                before = sum(self.sessions[each].before.used(unit) for each in below)
                turns = [each for each in self.turns if each.session in below and not _same(each, without)]
                found.append(Budget(above, unit, value, value - before - sum(t.spent(unit, now) for t in turns)))
        return found

    def begin(self, asked: Asked, turn: StoredTurn, now: float, *, need: int, resumes: bool) -> None:
        """Add a turn. need: tokens that it takes at least. resumes: whether another ingress had begun it, which is dead
        or has left it: then it is in place of that one's, and no budget refuses it. Raises SessionBudgetSpent,
        InvalidParameter."""
        self._enter(asked, now)
        self.drop(turn)
        session = self.sessions[asked.session]
        session.used_at = now
        session.max_tokens = session.max_tokens if asked.max_tokens is None else asked.max_tokens
        session.max_budget = session.max_budget if asked.max_budget is None else asked.max_budget
        left = [each for each in self.turns if (each.id, each.session) == (turn.id, turn.session)]
        if resumes and left:
            self.turns.remove(before := left[-1])
            turn.began_at = before.began_at
            turn.reserved_tokens = before.output_tokens + before.reserved_tokens  # its client may have them already
            turn.reserved_money = before.cost + before.reserved_money
        elif not resumes:
            for budget in self.budgets(asked.session, now):
                least = need if budget.unit == "tokens" else 0
                if budget.left < least or budget.left <= 0:
                    header = HEADERS[budget.unit]
                    raise SessionBudgetSpent(budget.session, header, budget.value, max(0.0, budget.left), least)
        self.turns.append(turn)
        self._add_up(now)

    def put(self, turn: StoredTurn) -> bool:
        """Write a turn in place of what was known of it. Returns False if there is none, as of a deleted session."""
        for i, each in enumerate(self.turns):
            if _same(each, turn):
                self.turns[i] = turn
                return True
        return False

    def drop(self, turn: StoredTurn) -> None:
        """Forget a turn for which nothing was computed."""
        self.turns = [each for each in self.turns if not _same(each, turn)]

    def remove(self, name: str) -> None:
        """Add a session that is not the first, and all below it, to the one above it, and forget them."""
        below = self.below(name)
        self.sessions[self.sessions[name].parent].before.add(self.usage(below))
        self.turns = [turn for turn in self.turns if turn.session not in below]
        for each in below:
            del self.sessions[each]

    def _enter(self, asked: Asked, now: float) -> None:
        """Make sure that the session is there, and the one above it."""
        name, parent = asked.session, asked.parent
        if name in self.sessions:
            if parent and parent != self.sessions[name].parent:
                limit = f"{self.sessions[name].parent!r}, with which session {name!r} has begun"
                raise InvalidParameter(PARENT_HEADER, parent, limit if self.sessions[name].parent else "left out")
            return
        if parent and parent not in self.sessions:
            self.sessions[parent] = Session("", now, now)
        if len(self.sessions) >= MAX_BELOW:
            above = {session.parent for session in self.sessions.values()} | {parent}
            running = {turn.session for turn in self.turns if turn.runs(now)}
            idle = [each for each in self.sessions if each not in above | running and self.sessions[each].parent]
            if not idle:
                limit = f"a session with fewer than {MAX_BELOW} sessions that run or have others below them"
                raise InvalidParameter(PARENT_HEADER, parent, limit)
            self.remove(min(idle, key=lambda each: self.sessions[each].used_at))
        self.sessions[name] = Session(parent, now, now)

    def _add_up(self, now: float) -> None:
        """Add the oldest turns to their sessions if there are too many."""
        for turn in [each for each in self.turns if not each.runs(now)][: max(0, len(self.turns) - MAX_TURNS)]:
            self.sessions[turn.session].before.add_turn(turn)
            self.turns.remove(turn)


def grant(left: float, step: float) -> float:
    """Return how much of what is left of a budget a turn may use before it asks again. step: what all its sequences use
    in one step."""
    return min(left, max(step, min(STEPS * step, left / 2))) if left > 0 else 0.0


def _same(turn: StoredTurn, other: StoredTurn | None) -> bool:
    return other is not None and (turn.id, turn.attempt) == (other.id, other.attempt)

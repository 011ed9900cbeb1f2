"""What an HTTP request says of its session besides its name, and its turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers

from deployments.parts.sessions.books import SessionBooks
from deployments.parts.sessions.live_turn import LiveTurn
from deployments.parts.sessions.record import MONEY_HEADER, PARENT_HEADER, TOKENS_HEADER, Asked
from deployments.routing.session import MAX_SESSION_ID, SESSION_HEADER, check_id
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest

MAX_DIGITS = 15


@dataclass(slots=True)
class SessionCall:
    """An HTTP request, before it is known whether it is a turn of a session."""

    books: SessionBooks
    owner: str
    parent: str
    max_tokens: int | None
    max_budget: float | None
    turn: LiveTurn | None = None

    @classmethod
    def of(cls, headers: Headers, books: SessionBooks, owner: str) -> SessionCall:
        """Read the headers. Raises InvalidParameter."""
        parent, tokens, money = (headers.get(name) for name in (PARENT_HEADER, TOKENS_HEADER, MONEY_HEADER))
        check_id(PARENT_HEADER, parent or "", MAX_SESSION_ID)
        max_tokens = None if tokens is None else _number(TOKENS_HEADER, tokens, "a whole number of tokens above 0")
        max_budget = None if money is None else _number(MONEY_HEADER, money, "an amount of money above 0, such as 1.50")
        return cls(books, owner, parent or "", None if max_tokens is None else int(max_tokens), max_budget)

    def turn_of(self, request: GenerateRequest, model: str, *, has_prices: bool) -> LiveTurn:
        """Return the turn, which begins with the first request to an engine. Raises InvalidParameter for a budget in
        money if the model has no prices."""
        if self.turn is None:
            if self.max_budget is not None and not has_prices:
                limit = f"left out, because model {model!r} has no prices"
                raise InvalidParameter(MONEY_HEADER, self.max_budget, limit)
            asked = Asked(
                session=request.session_id,
                parent=self.parent,
                max_tokens=self.max_tokens,
                max_budget=self.max_budget,
            )
            self.turn = LiveTurn(self.books, self.owner, asked, request, model, has_prices=has_prices)
        return self.turn

    def check_named(self) -> None:
        """Raise InvalidParameter for a request without a session that says something of one."""
        given = {PARENT_HEADER: self.parent, TOKENS_HEADER: self.max_tokens, MONEY_HEADER: self.max_budget}
        for name, value in given.items():
            if self.turn is None and value:
                limit = f"left out, because the request names no session ({SESSION_HEADER})"
                raise InvalidParameter(name, value, limit)


_current: ContextVar[SessionCall | None] = ContextVar("session_call", default=None)


def current_call() -> SessionCall | None:
    """Return the call of the HTTP request on which the current task works; None outside of any."""
    return _current.get()


@contextmanager
def current(call: SessionCall) -> Iterator[None]:
    """Make this the call of the current task."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _number(name: str, given: str, limit: str) -> float:
    whole, point, rest = given.partition(".")
    digits = whole + rest
    may = point == "" or name == MONEY_HEADER
    if not (may and digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS and whole and int(digits)):
        raise InvalidParameter(name, given, limit)
    return float(given)

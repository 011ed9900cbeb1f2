"""Routes of sessions: what they have used, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, Field
from starlette.middleware import Middleware

from deployments.edge_part import EdgePart
from deployments.http.body import validated
from deployments.http.context import key_client, key_name
from deployments.http.json_body import json_response
from deployments.http.route import OWNER, Route
from deployments.openai.served.served_models import ServedModels
from deployments.parts.sessions.books import TTL_S, SessionBooks
from deployments.parts.sessions.errors import SessionNotFound
from deployments.parts.sessions.middleware import SessionMiddleware
from deployments.parts.sessions.record import SessionTree, SessionTurn, SessionUsage, Unit
from deployments.storage.key_value import KeyValueStore
from engine.errors import InvalidParameter
from engine.wire.parts.holds import ReleaseHolds


class SessionQuery(BaseModel):
    """GET /v1/sessions"""

    after: str | None = None
    """Last id of the previous page."""
    limit: int = Field(default=20, ge=1, le=100)


class SessionSummary(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    created_at: float
    """Seconds since 1970, as the next two."""
    used_at: float
    """When its newest turn began."""
    expires_at: float
    """When it ends, if there is no other request of it or of those with which it shares a budget."""
    parent: str | None
    children: list[str]
    max_tokens: int | None
    """Budget of its turns and of those below it, in tokens of prompts and answers."""
    max_budget: float | None
    """The same in money."""
    remaining_tokens: float | None
    """What is left of the smallest such budget, its own or that of a session above it; what turns that run have
    reserved is not in it. None without a budget."""
    remaining_budget: float | None
    usage: SessionUsage
    """Of its turns and of all below it."""
    own_usage: SessionUsage


class SessionBody(SessionSummary, kw_only=True):
    turns: list[SessionTurn]
    """Its newest turns and those below it, oldest first. `usage` has older ones, too."""


class SessionList(msgspec.Struct):
    data: list[SessionSummary]
    has_more: bool
    object: Literal["list"] = "list"


class DeletedSession(msgspec.Struct):
    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


class SessionRoutes(EdgePart):
    def __init__(self, store: KeyValueStore, models: ServedModels):
        self._books, self._models = SessionBooks(store), models

    def middleware(self) -> Sequence[Middleware]:
        return (Middleware(SessionMiddleware, self._books),)

    def routes(self) -> list[Route]:
        path, one = "/v1/sessions", "/v1/sessions/{name:path}"
        newest = "The sessions that are below no other, the one that was used last first."
        return [
            Route(OWNER, "GET", path, self.list_sessions, newest, body=SessionQuery, result=SessionList),
            Route(OWNER, "GET", one, self.retrieve, "What a session has used, by turn.", result=SessionBody),
            Route(OWNER, "DELETE", one, self.delete, "End a session, and its holds.", result=DeletedSession),
        ]

    async def list_sessions(self, request: Request) -> Response:
        owner, query = key_name(request) or "", validated(SessionQuery, dict(request.query_params))
        names = await self._books.listed(owner)
        if query.after is not None:
            if query.after not in names:
                raise InvalidParameter("after", query.after, "the id of a session that is below no other")
            names = names[names.index(query.after) + 1 :]
        found = [await self._summary(owner, name) for name in names[: query.limit]]
        return json_response(SessionList([each for each in found if each is not None], len(names) > query.limit))

    async def retrieve(self, request: Request, name: str) -> Response:
        _, tree = await self._books.find(key_name(request) or "", name)
        now, below = self._books.now(), tree.below(name)
        turns = [turn.shown(now) for turn in tree.turns if turn.session in below]
        summary = msgspec.structs.asdict(summary_of(tree, name, now))
        return json_response(SessionBody(**summary, turns=turns))

    async def delete(self, request: Request, name: str) -> Response:
        ended, client = await self._books.delete(key_name(request) or "", name), key_client(request)
        pools = self._models.pools().values()
        await asyncio.gather(*(pool.tell(ReleaseHolds(each, client)) for pool in pools for each in ended))
        return json_response(DeletedSession(name))

    async def _summary(self, owner: str, name: str) -> SessionSummary | None:
        try:
            _, tree = await self._books.find(owner, name)
        except SessionNotFound:  # it has just ended
            return None
        return summary_of(tree, name, self._books.now())


def summary_of(tree: SessionTree, name: str, now: float) -> SessionSummary:
    session, left = tree.sessions[name], dict[Unit, float]()
    for budget in tree.budgets(name, now):
        left[budget.unit] = max(0.0, min(budget.left, left.get(budget.unit, budget.left)))
    return SessionSummary(
        id=name,
        created_at=session.created_at,
        used_at=session.used_at,
        expires_at=max(each.used_at for each in tree.sessions.values()) + TTL_S,
        parent=session.parent or None,
        children=[each for each, other in tree.sessions.items() if other.parent == name],
        max_tokens=session.max_tokens,
        max_budget=session.max_budget,
        remaining_tokens=left.get("tokens"),
        remaining_budget=left.get("money"),
        usage=tree.usage(tree.below(name)),
        own_usage=tree.usage([name]),
    )

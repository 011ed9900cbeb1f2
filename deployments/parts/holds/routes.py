"""The route that ends holds: prompts that stay cached for a time (docs/holds.md)."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from fastapi import Request, Response

from deployments.edge_part import EdgePart
from deployments.http.context import key_client
from deployments.http.json_body import json_response
from deployments.http.route import OWNER, Route
from deployments.openai.served.served_models import ServedModels
from deployments.routing.session import MAX_SESSION_ID
from engine.errors import InvalidParameter
from engine.wire.parts.holds import ReleaseHolds


class ReleasedHolds(msgspec.Struct):
    id: str
    object: Literal["hold"] = "hold"
    deleted: Literal[True] = True


class HoldRoutes(EdgePart):
    def __init__(self, models: ServedModels):
        self._models = models

    def routes(self) -> list[Route]:
        what = "End the holds of a session, a prompt_cache_key or a response."
        return [Route(OWNER, "DELETE", "/v1/holds/{name:path}", self.release, what, result=ReleasedHolds)]

    async def release(self, request: Request, name: str) -> Response:
        """End the holds of this name on all replicas, for the request's API key, or for all clients on a server without
        keys."""
        if not 0 < len(name) <= 4 * MAX_SESSION_ID:
            raise InvalidParameter("name", name, f"between 1 and {4 * MAX_SESSION_ID} characters")
        await self._release(name, key_client(request))
        return json_response(ReleasedHolds(name))

    async def response_deleted(self, name: str) -> None:
        await self._release(name, None)

    async def _release(self, name: str, client: str | None) -> None:
        await asyncio.gather(*(pool.tell(ReleaseHolds(name, client)) for pool in self._models.pools().values()))

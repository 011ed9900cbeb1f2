"""Routes of tapes."""

from __future__ import annotations

import msgspec
from fastapi import Response

from deployments.edge_part import EdgePart
from deployments.http.json_body import json_response
from deployments.http.route import ADMIN, Route
from deployments.observability.telemetry import Telemetry
from deployments.openai.served.served_models import ServedModels
from deployments.parts.tape.choice_log import ChoiceLog
from deployments.parts.tape.cluster_tapes import ClusterTapes
from deployments.parts.tape.late_first_tokens import LateFirstTokens
from deployments.parts.tape.questions import KeptTape
from deployments.parts.tape.tape_settings import settings_of
from engine.errors import RequestError

DECISIONS = "what schedulers and routers have decided, without text"


class TapeList(msgspec.Struct, frozen=True):
    tapes: list[KeptTape]
    """This server's own first, then others, the newest first."""


class TapeNotFound(RequestError):
    """No replica has a file with this name."""

    status, type = 404, "not_found_error"

    def __init__(self, name: str):
        Exception.__init__(self, name)
        self.message, self.param = f"there is no tape {name!r} (engine.tape_mib)", None


class TapeRoutes(EdgePart):
    def __init__(self, models: ServedModels, telemetry: Telemetry):
        choices = []
        for model in models.values():
            if (settings := settings_of(model.info)) is not None:
                choices.append(ChoiceLog.of(model.pool, settings.max_mib))
                model.admission.first_token_observers.append(LateFirstTokens(model.pool, settings.ttft_s).observe)
        self._tapes = ClusterTapes(models.pools().values(), choices, telemetry)

    def routes(self) -> list[Route]:
        taken = "What the schedulers and routers have decided, for `manta replay`; no text."
        listed, read = "The files of tapes that replicas have kept.", "A file of tapes that a replica has kept."
        file = "application/octet-stream"
        return [
            Route(ADMIN, "GET", "/debug/tape", self.take, taken, result=file, of_others=DECISIONS),
            Route(ADMIN, "GET", "/debug/tapes", self.list_kept, listed, result=TapeList, of_others=DECISIONS),
            Route(ADMIN, "GET", "/debug/tapes/{name}", self.read_kept, read, result=file, of_others=DECISIONS),
        ]

    async def take(self) -> Response:
        """Return the tapes of all engines and routers, as a file of tapes."""
        return Response(await self._tapes.take(), media_type="application/octet-stream")

    async def list_kept(self) -> Response:
        """Return the files of kept tapes on the machines of all replicas."""
        return json_response(TapeList(await self._tapes.kept()))

    async def read_kept(self, name: str) -> Response:
        """Return a file of kept tapes. Raises TapeNotFound."""
        data = await self._tapes.read(name)
        if not data:
            raise TapeNotFound(name)
        return Response(data, media_type="application/octet-stream")

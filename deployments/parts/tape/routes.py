"""Routes of tapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

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
from deployments.parts.tape.tape_viewer import TapeQuestion, TapeViewer

DECISIONS = "what schedulers and routers have decided, without text"


class TapeList(msgspec.Struct, frozen=True):
    tapes: list[KeptTape]
    """The newest first."""


class TapeRoutes(EdgePart):
    def __init__(self, models: ServedModels, telemetry: Telemetry, *, on_console: bool):
        """on_console: whether the console shows tapes."""
        choices = []
        for model in models.values():
            if (settings := settings_of(model.info)) is not None:
                choices.append(ChoiceLog.of(model.pool, settings.max_mib))
                model.admission.first_token_observers.append(LateFirstTokens(model.pool, settings.ttft_s).observe)
        self._tapes = ClusterTapes(models.pools().values(), choices, telemetry)
        self._viewer, self._on_console = TapeViewer(), on_console

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with self._viewer.served():
            yield

    def routes(self) -> list[Route]:
        what = "What the schedulers and routers have decided, for `manta replay`; no text."
        taken = Route(
            ADMIN, "GET", "/debug/tape", self.take, what, result="application/octet-stream", of_others=DECISIONS
        )
        shown = [
            Route(ADMIN, "GET", "/console/tapes", self.list_kept, of_others=DECISIONS),
            Route(ADMIN, "GET", "/console/tapes/{name}", self.show, of_others=DECISIONS),
        ]
        return [taken, *(shown if self._on_console else ())]

    async def take(self) -> Response:
        """Return the tapes of all engines and routers, as a file of tapes."""
        return Response(await self._tapes.take(), media_type="application/octet-stream")

    async def list_kept(self) -> Response:
        """Return the files of kept tapes on the machines of all replicas."""
        return json_response(TapeList(await self._tapes.kept()))

    async def show(
        self, name: str, engine: str = "", seconds: float | None = None, position: int | None = None
    ) -> Response:
        """Return what a moment looked like, as TapeAnswer. name: of a file; or `now` and anything, for what the engines
        have when this name is first asked for."""
        question = TapeQuestion(engine, seconds, position)
        fetch = self._tapes.take if name.startswith("now") else partial(self._tapes.read, name)
        return Response(await self._viewer.look(name, question, fetch), media_type="application/json")

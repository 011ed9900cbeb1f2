"""Routes of the console: the files of its page, which need no key, and the data that it shows, which do."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request, Response

from deployments.edge_part import EdgePart
from deployments.http.context import is_admin
from deployments.http.debug import VERSION
from deployments.http.json_body import json_response
from deployments.http.route import ADMIN, KEY, OPEN, Route
from deployments.http.streaming import EventStream
from deployments.observability.telemetry import Telemetry
from deployments.openai.served.served_models import ServedModels
from deployments.options.console import ConsoleConfig
from deployments.parts.console.cluster_watcher import ClusterWatcher
from deployments.parts.console.costs_view import CostsView
from deployments.parts.console.engine_hours import EngineHours
from deployments.parts.console.feed import ClusterFeed

PAGE = Path(__file__).parent / "page"
HEADERS = {
    # only this server's scripts, styles and connections, and images that users add (`data:`); the browser itself
    # refuses to turn text into markup
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class ModelFacts(msgspec.Struct, frozen=True):
    """A model as the configuration and its files describe it."""

    name: str
    aliases: tuple[str, ...]
    root: str
    max_model_len: int
    vocab_size: int
    generates: bool
    input_modalities: list[str]
    default_sampling: dict[str, Any]
    adapters: list[str]


class ConsoleFacts(msgspec.Struct, frozen=True):
    """Facts of the configuration, and the adapters that there are now."""

    version: str
    models: list[ModelFacts]
    configuration: dict[str, Any]


class PageFile:
    """A file of the page, with its headers."""

    def __init__(self, path: Path):
        self._content = path.read_bytes()
        self._type = mimetypes.guess_type(path.name)[0]
        self._etag = f'"{hashlib.sha256(self._content).hexdigest()[:16]}"'

    async def response(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self._etag}
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._type, headers=headers)


class ConsoleRoutes(EdgePart):
    def __init__(self, models: ServedModels, telemetry: Telemetry, config: ConsoleConfig):
        self._models, self._telemetry, self._config = models, telemetry, config
        self._feed = ClusterFeed(ClusterWatcher(models.pools(), telemetry))
        self._engine_hours = EngineHours(models.pools())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with self._engine_hours.watched():
            yield

    def routes(self) -> list[Route]:
        files = {path.name: PageFile(path).response for path in sorted(PAGE.iterdir())}
        shown = "replicas, their counts and queues; single requests to admins only"
        facts = "models and adapters; the configuration to admins only"
        return [
            Route(OPEN, "GET", "/", files.pop("index.html")),
            *(Route(OPEN, "GET", f"/console/page/{name}", response) for name, response in files.items()),
            Route(
                KEY,
                "GET",
                "/console/state",
                self.state,
                of_others=shown,
            ),
            Route(KEY, "GET", "/console/facts", self.facts, of_others=facts),
            Route(ADMIN, "GET", "/console/costs", self.costs, of_others="what every key has used"),
        ]

    async def state(self, request: Request) -> Response:
        return EventStream(self._feed.events(with_requests=is_admin(request)))

    async def costs(self) -> Response:
        lines, _ = await asyncio.gather(self._telemetry.all_usage(), self._engine_hours.look())
        hours, rates = self._engine_hours.hours, self._engine_hours.prompt_token_s
        return json_response(CostsView.of(lines, hours, rates, time.time(), self._config.currency))

    async def facts(self, request: Request) -> Response:
        found = [
            ModelFacts(
                name=model.info.name,
                aliases=model.info.aliases,
                root=model.info.root,
                max_model_len=model.info.max_model_len,
                vocab_size=model.info.vocab_size,
                generates="generate" in model.info.supported_tasks,
                input_modalities=model.input_modalities,
                default_sampling=dict(model.info.default_sampling),
                adapters=await self._models.further_of(model.info.name),
            )
            for model in self._models.values()
        ]
        configuration = self._config.configuration if is_admin(request) else {}
        return json_response(ConsoleFacts(VERSION, found, configuration))

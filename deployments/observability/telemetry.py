"""Counts, traces and timelines of the requests of one ingress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.billing.bill import Bill, cost_headers
from deployments.billing.hourly_usage import HourlyUsage, UsageLine
from deployments.billing.totals import UsageTotals
from deployments.errors import RequestNotFound
from deployments.observability.stats import IngressStats
from deployments.observability.timeline import IngressOverview, RequestTimeline, RequestTimelines, SequenceTimeline
from deployments.observability.tracing import RequestTrace, Tracing, operation_of
from deployments.replicas.scaling_report import ScalingChange
from engine.distributed.refusals import REFUSALS

NOT_COUNTED = frozenset(
    {"/console/costs", "/console/state", "/health", "/load", "/metrics", "/metrics/node", "/ping", "/version"}
)  # machines poll them; vLLM leaves them out too
NUM_NEWEST = 50  # requests of each ingress that the console lists
MAX_LINES = 2000  # hours, keys, models and adapters of each ingress that the console tells apart
CLIENT_LEFT = 499  # status for metrics only, as proxies log it; never sent
NO_ROUTE, NO_METHOD = "none", "other"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class IngressUsage(msgspec.Struct, frozen=True):
    """What the API keys have used in the last 24 hours, as one ingress has counted it."""

    ingress_id: str
    lines: list[tuple[UsageLine, UsageTotals]]


T = TypeVar("T")
Report = TypeVar("Report", IngressStats, IngressOverview, IngressUsage)


class NoPeers:
    """The other ingresses of an application that has only one."""

    async def ask(self, what: str, kind: type[T], *args: str) -> list[T]:
        """Return the reports of all ingresses that answer; the asking one may be among them. what: a key of
        `Telemetry.reports`. kind: type of a report."""
        return []

    async def scaling_changes(self) -> list[ScalingChange]:
        """Return the newest scaling changes of all pools, oldest first."""
        return []

    async def tell(self, part: str) -> None:
        """Tell the ends of a part in all ingresses that what they share has changed. part: name of its folder."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The HTTP request on which the current task works."""

    started_at: float  #: start on the monotonic clock, before its body was read
    started_ns: int  #: the same time in ns since 1970
    trace: RequestTrace | None = None
    operation: str = "text_completion"  #: gen_ai.operation.name
    bills: list[Bill] = field(default_factory=list)  #: of all that engines compute for it

    def ns_since_1970(self, at: float) -> int:
        """Convert a time on the monotonic clock. (The system clock can be set in between; spans would then overlap.)"""
        return self.started_ns + round((at - self.started_at) * 1e9)


_current: ContextVar[HttpRequest | None] = ContextVar("http_request", default=None)


def current_request() -> HttpRequest:
    """Return the current HTTP request; outside any request, one that starts now."""
    return _current.get() or HttpRequest(time.monotonic(), time.time_ns())


class Telemetry:
    """Counts, traces and timelines of one ingress, and access to those of the other ingresses."""

    def __init__(
        self,
        ingress_id: str,
        tracing: Tracing | None = None,
        peers: NoPeers | None = None,
        *,
        node: str = "",
        keeps_texts: bool = False,
    ):
        """node: as in IngressStats. keeps_texts: whether timelines contain prompts and outputs."""
        self.tracing, self.hourly = tracing, HourlyUsage()
        self.timelines = RequestTimelines(ingress_id, keeps_texts=keeps_texts)
        self.stats = IngressStats(ingress_id, node)
        #: Functions that return a report of this ingress to the others, by its name. Parts add theirs.
        self.reports: dict[str, Callable[..., Any]] = {
            "stats": self.own_stats,
            "overview": self.own_overview,
            "usage": self.own_usage,
            "timelines": self.own_timelines,
        }
        self.peers = peers or NoPeers()

    def close(self) -> None:
        """Send the remaining traces. Takes up to two seconds."""
        if self.tracing is not None:
            self.tracing.close()

    def own_stats(self) -> IngressStats:
        """Return the counts of this ingress, with those of its process."""
        self.stats.refused = REFUSALS.counts()
        return self.stats

    async def all_stats(self) -> list[IngressStats]:
        """Return the counts of this ingress and of every other one that answers."""
        return [self.own_stats(), *await self._others("stats", IngressStats)]

    def own_overview(self) -> IngressOverview:
        waiting = {name: model.waiting for name, model in self.stats.models.items()}
        return IngressOverview(self.timelines.ingress_id, waiting, self.timelines.newest(NUM_NEWEST))

    async def overviews(self) -> list[IngressOverview]:
        """Return the overview of this ingress and of every other one that answers."""
        return [self.own_overview(), *await self._others("overview", IngressOverview)]

    def own_usage(self) -> IngressUsage:
        newest = self.hourly.newest(self.hourly.now - timedelta(days=1), MAX_LINES)
        return IngressUsage(self.timelines.ingress_id, newest)

    async def all_usage(self) -> list[tuple[UsageLine, UsageTotals]]:
        """Return the lines of this ingress and of every other one that answers."""
        return [line for each in (self.own_usage(), *await self._others("usage", IngressUsage)) for line in each.lines]

    async def _others(self, what: str, kind: type[Report]) -> list[Report]:
        found = await self.peers.ask(what, kind)
        return [report for report in found if report.ingress_id != self.stats.ingress_id]

    async def scaling_changes(self) -> list[ScalingChange]:
        """Return the newest changes of all pools, oldest first."""
        return await self.peers.scaling_changes()

    def own_timelines(self, name: str) -> list[SequenceTimeline]:
        return self.timelines.of(name)

    async def explain(self, name: str, key: str | None = None) -> RequestTimeline:
        """Return the timeline of a request, gathered from every ingress that answers. name: as in
        SequenceTimeline.is_of. key: name of the API key of which it must be; None for any.

        Raises RequestNotFound if none of them knows the request.
        """
        others = await self.peers.ask("timelines", list[SequenceTimeline], name)
        every = [*others, self.own_timelines(name)]
        found = {each.request_id: each for timelines in every for each in timelines if key in (None, each.key)}
        if not found:
            raise RequestNotFound(name)
        return RequestTimeline(name, sorted(found.values(), key=lambda timeline: timeline.arrived_at))


class MetricsMiddleware:
    """ASGI middleware: counts, times and traces every HTTP request, and tells clients what it has cost if that is known
    before its headers are sent."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry):
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        started, started_ns, status, sent = time.monotonic(), time.time_ns(), 0, 0

        async def counting(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                if costs := cost_headers(request.bills):
                    MutableHeaders(scope=message).update(costs)
            else:
                sent += len(message.get("body", b""))
            await send(message)

        tracing = self._telemetry.tracing
        trace = tracing.start(scope, started_ns) if tracing else None
        request = HttpRequest(started, started_ns, trace, operation_of(scope["path"]))
        token = _current.set(request)
        try:
            await self._app(scope, receive, counting)
        except asyncio.CancelledError:
            status = status or CLIENT_LEFT
            raise
        finally:
            status = status or 500  # no response was started: the HTTP server sends a 500
            _current.reset(token)
            route = scope.get("route")
            path = NO_ROUTE if route is None else route.path
            method = scope["method"] if scope["method"] in METHODS else NO_METHOD
            ended = time.monotonic()
            self._telemetry.stats.answered(f"{method} {path}", status, ended - started, _content_length(scope), sent)
            if trace:
                trace.end(path, status, request.ns_since_1970(ended))


def _content_length(scope: Scope) -> int:
    """Return the body's Content-Length; 0 if it is missing or invalid."""
    given = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(given) if given.isdigit() and len(given) < 16 else 0

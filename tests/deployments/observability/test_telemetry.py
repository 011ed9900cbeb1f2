"""What one ingress knows of the others, and what it makes of odd HTTP requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from deployments.observability.stats import IngressStats, ModelStats
from deployments.observability.telemetry import MetricsMiddleware, NoPeers, Telemetry


@dataclass
class FakePeers(NoPeers):
    found: list[IngressStats]

    async def ask(self, what: str, kind: type[Any], *args: str) -> list[Any]:
        return self.found


async def test_counts_of_other_ingresses_stand_beside_the_own_ones_which_are_never_stale():
    stale, other = IngressStats("a"), IngressStats("b")
    other.answered("GET /", 200, 0.1, 0, 5)

    telemetry = Telemetry("a", peers=FakePeers([stale, other]))
    telemetry.stats.answered("GET /", 404, 0.1, 0, 5)
    own, theirs = await telemetry.all_stats()
    assert (own.ingress_id, own.routes["GET /"].statuses) == ("a", {404: 1})
    assert (theirs.ingress_id, theirs.routes["GET /"].statuses) == ("b", {200: 1})


def test_counts_are_the_same_after_their_way_between_ingresses():
    stats = IngressStats("a", models={"m": ModelStats()}, dropped_deltas=3)
    stats.answered("POST /v1/completions", 200, 0.02, 10, 20)
    stats.models["m"].finished["stop"] += 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=IngressStats) == stats


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"abc"})


async def is_cancelled(scope: Any, receive: Any, send: Any) -> None:
    raise asyncio.CancelledError


async def is_cancelled_late(scope: Any, receive: Any, send: Any) -> None:
    await answers(scope, receive, send)
    raise asyncio.CancelledError


async def fails(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("app", "length", "statuses", "num_bytes"),
    [
        (answers, b"12", {200: 1}, (12, 3)),
        (answers, b"9" * 5000, {200: 1}, (0, 3)),
        (answers, b"-1", {200: 1}, (0, 3)),
        (is_cancelled, b"0", {499: 1}, (0, 0)),
        (is_cancelled_late, b"0", {200: 1}, (0, 3)),
        (fails, b"0", {500: 1}, (0, 0)),
    ],
)
async def test_every_request_counts_once_however_it_ends(app, length, statuses, num_bytes):
    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "path": "/a", "method": "POST", "headers": [(b"content-length", length)]}
    telemetry = Telemetry("a")
    call = asyncio.create_task(MetricsMiddleware(app, telemetry)(scope, None, send))
    await asyncio.wait([call])
    assert call.cancelled() == (app in (is_cancelled, is_cancelled_late))
    assert call.cancelled() or isinstance(call.exception(), ValueError) == (app is fails)
    (route,) = telemetry.stats.routes.values()
    assert route.statuses == statuses
    assert (route.request_bytes, route.response_bytes) == num_bytes

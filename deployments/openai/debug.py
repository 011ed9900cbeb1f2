"""Routes for operators: the version, the load, live handoffs, and the timeline of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import RequestTimeline, SequenceTimeline, TimelineEvent
from deployments.replicas.engine_pool import EnginePool, all_statuses
from engine.errors import RequestNotFound
from engine.wire.handoff_stats import HandoffInfo
from engine.wire.messages import EngineRequestLog

VERSION = version("manta-serve")


class Version(msgspec.Struct):
    version: str = VERSION


class ServerLoad(msgspec.Struct):
    server_load: int
    """Sequences of this ingress that wait or run."""


class LiveHandoff(msgspec.Struct):
    """One handoff as one of its engines saw it within the last second."""

    model: str
    engine: str
    handoff: HandoffInfo


class LiveHandoffs(msgspec.Struct):
    """At most MAX_LIVE_HANDOFFS of each engine, oldest first."""

    handoffs: list[LiveHandoff]


async def live_handoffs(pools: Mapping[str, EnginePool]) -> LiveHandoffs:
    """Return KV transfers under way between engines, without those of replicas that do not answer.

    pools: by model name.
    """
    found = await asyncio.gather(*map(all_statuses, pools.values()))
    handoffs = [
        LiveHandoff(model, status.engine_id, handoff)
        for model, (decode, prefill) in zip(pools, found, strict=True)
        for status in decode + prefill
        for handoff in status.live_handoffs
    ]
    return LiveHandoffs(sorted(handoffs, key=lambda live: -live.handoff.age_s))


async def request_timeline(name: str, telemetry: Telemetry, pools: Mapping[str, EnginePool]) -> RequestTimeline:
    """Return the events of a request that its ingress and its engines recorded.

    An engine that is gone, or does not answer in time, adds nothing; nor does one that has had many requests since.
    Raises RequestNotFound if no ingress knows the request. name: see SequenceTimeline.is_of. pools: by model name.
    """
    timelines = await telemetry.all_timelines(name)
    if not timelines:
        raise RequestNotFound(name)
    attempts: dict[str, list[str]] = {}  # by model
    for timeline in timelines:
        attempts.setdefault(timeline.model, []).extend(timeline.attempts)
    queries = [pools[model].request_logs(names) for model, names in attempts.items() if model in pools]
    request_logs = [request_log for pool in await asyncio.gather(*queries) for request_log in pool]
    return RequestTimeline(name, [_with_request_logs(timeline, request_logs) for timeline in timelines])


def _with_request_logs(timeline: SequenceTimeline, request_logs: list[EngineRequestLog]) -> SequenceTimeline:
    """Return a copy with the lines of the engines."""
    lines = [
        TimelineEvent(at, request_log.engine_id, line)
        for request_log in request_logs
        for attempt in timeline.attempts
        for at, line in request_log.lines.get(attempt, ())
    ]
    events = sorted([*timeline.events, *lines], key=lambda event: event.at)
    return msgspec.structs.replace(timeline, events=events)

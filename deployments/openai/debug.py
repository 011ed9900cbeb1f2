"""The response of /debug/requests/{id}: what happened to one request, as its ingress and all its engines tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import RequestTimeline, SequenceTimeline, TimelineEvent
from deployments.replicas.engine_pool import EnginePool
from engine.errors import RequestNotFound
from engine.wire.messages import EngineRequestLog


async def request_timeline(name: str, telemetry: Telemetry, pools: Mapping[str, EnginePool]) -> RequestTimeline:
    """name: see SequenceTimeline.is_of. pools: by model name. An engine that is gone, or does not answer in time, tells
    nothing; nor does one that has had many requests since.

    Raises RequestNotFound if no ingress knows the request.
    """
    timelines = await telemetry.all_timelines(name)
    if not timelines:
        raise RequestNotFound(name)
    attempts: dict[str, list[str]] = {}  # by model
    for timeline in timelines:
        attempts.setdefault(timeline.model, []).extend(timeline.attempts)
    asked = [pools[model].request_logs(names) for model, names in attempts.items() if model in pools]
    request_logs = [request_log for pool in await asyncio.gather(*asked) for request_log in pool]
    return RequestTimeline(name, [_with_request_logs(timeline, request_logs) for timeline in timelines])


def _with_request_logs(timeline: SequenceTimeline, request_logs: list[EngineRequestLog]) -> SequenceTimeline:
    """A copy, with what the engines know."""
    told = [
        TimelineEvent(at, request_log.engine_id, line)
        for request_log in request_logs
        for attempt in timeline.attempts
        for at, line in request_log.lines.get(attempt, ())
    ]
    events = sorted([*timeline.events, *told], key=lambda event: event.at)
    return msgspec.structs.replace(timeline, events=events)
